"""Checks of parameters that several rewards share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain.registry import LARGEST

LARGEST_WORKERS = 1024


def limit_problems(params: Mapping[str, Any]) -> list[str]:
    """Return the problems of `timeout_s`, `workers` and `memory_mb`, if given."""
    return [
        *positive_problem("timeout_s", params.get("timeout_s", 1.0)),
        *_whole_problem("workers", params.get("workers", 0), 0, LARGEST_WORKERS),
        *_whole_problem("memory_mb", params.get("memory_mb", 64), 64, 1 << 20),
    ]


def positive_problem(key: str, value: object) -> list[str]:
    """Return the problem of a number that must be above 0, if any."""
    if is_number(value) and value > 0:  # type: ignore[operator]
        return []
    return [f"{key}: got {value!r}; needs a number above 0"]


def choice_problem(key: str, value: object, choices: tuple[str, ...]) -> list[str]:
    """Return the problem of a value that must be one of the choices, if any."""
    return [] if value in choices else [f"{key}: got {value!r}; needs one of {', '.join(choices)}"]


def is_number(value: object) -> bool:
    """Whether a value is a finite number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _whole_problem(key: str, value: object, least: int, most: int) -> list[str]:
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return []
    return [f"{key}: got {value!r}; needs a whole number from {least} to {most}"]
