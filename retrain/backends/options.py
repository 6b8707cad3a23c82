"""How backends check `[backend.options]`: one rule per key, and the same message for the same mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from retrain.errors import ConfigError
from retrain.registry import nearest

Options = TypeVar("Options")
Rule = tuple[Callable[[object], bool], str]  # whether a value is valid, and what is needed instead

TRUTH: Rule = (lambda value: isinstance(value, bool), "true or false")
TEXT: Rule = (lambda value: isinstance(value, str), "a string")


def whole(least: int, most: int, wanted: str = "") -> Rule:
    """Return a rule for a whole number in a range; `wanted` replaces the default description."""

    def fits(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    return fits, wanted or f"a whole number from {least:g} to {most:g}"


def number(least: float, most: float, wanted: str = "") -> Rule:
    """Return a rule for a finite number in a range; `wanted` replaces the default description."""

    def fits(value: object) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and least <= value <= most  # type: ignore[operator]

    return fits, wanted or f"a number from {least:g} to {most:g}"


def one_of(*choices: str) -> Rule:
    """Return a rule for one of several words."""
    *others, last = map(repr, choices)
    return (lambda value: value in choices), f"{', '.join(others)} or {last}"


def problems_of(options: Mapping[str, object], rules: Mapping[str, Rule]) -> list[str]:
    """Return one line per unknown key or invalid value, starting with the key.

    Args:
        options: a `[backend.options]` table.
        rules: one for each known key.
    """
    found = ((key, _problem(key, value, rules)) for key, value in options.items())
    return [f"{key}: {problem}" for key, problem in found if problem]


def parsed(kind: Callable[..., Options], options: Mapping[str, Any], problems: Sequence[str]) -> Options:
    """Return checked options as a backend's own type.

    Raises:
        ConfigError: lists every problem.
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
