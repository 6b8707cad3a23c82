"""How backends check `[backend.options]`: a rule for each key, and the same words for the same mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from retrain.errors import ConfigError
from retrain.registry import nearest

Options = TypeVar("Options")
Rule = tuple[Callable[[object], bool], str]  # whether a value fits, and what is needed in its place

TRUTH: Rule = (lambda value: isinstance(value, bool), "true or false")
TEXT: Rule = (lambda value: isinstance(value, str), "a string")


def whole(least: int, most: int, wanted: str = "") -> Rule:
    """Ask for a whole number in a range; `wanted` says so better than by its ends alone."""

    def fits(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    return fits, wanted or f"a whole number from {least:g} to {most:g}"


def number(least: float, most: float, wanted: str = "") -> Rule:
    """Ask for a finite number in a range; `wanted` says so better than by its ends alone."""

    def fits(value: object) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and least <= value <= most  # type: ignore[operator]

    return fits, wanted or f"a number from {least:g} to {most:g}"


def one_of(*choices: str) -> Rule:
    """Ask for one of some words."""
    *others, last = map(repr, choices)
    return (lambda value: value in choices), f"{', '.join(others)} or {last}"


def problems_of(options: Mapping[str, object], rules: Mapping[str, Rule]) -> list[str]:
    """List unknown keys and values that do not fit, one line each that starts with its key.

    Args:
        options: a `[backend.options]` table.
        rules: one for each key that the backend knows.
    """
    found = ((key, _problem(key, value, rules)) for key, value in options.items())
    return [f"{key}: {problem}" for key, problem in found if problem]


def parsed(kind: Callable[..., Options], options: Mapping[str, Any], problems: Sequence[str]) -> Options:
    """Return checked options as a backend's own type.

    Raises:
        ConfigError: there are problems; says them all.
    """
    if problems:
        raise ConfigError([f"[backend.options].{problem}" for problem in problems])
    return kind(**options)


def _problem(key: str, value: object, rules: Mapping[str, Rule]) -> str:
    if key not in rules:
        near = nearest(key, rules)
        return "unknown key; " + (f"did you mean {near!r}?" if near else f"known: {', '.join(rules)}")
    fits, wanted = rules[key]
    return "" if fits(value) else f"got {value!r}; needs {wanted}"
