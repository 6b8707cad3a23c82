"""`[backend.options]` of the numpy backend: types, ranges and defaults."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite

from retrain.errors import ConfigError

MAX_WIDTH = 4096  # past this, one core needs minutes for a step
MAX_LATENCY_S = 3600.0
CHOICES = {"dtype": ("float32", "float64"), "optimizer": ("adam", "sgd")}


@dataclass(frozen=True, slots=True)
class NumpyOptions:
    """Size and arithmetic of the policy, and the API that it may pose as."""

    embedding: int = 24  # numbers per character
    hidden: int = 64  # numbers in the recurrent state
    dtype: str = "float32"  # float64 is slower and checks gradients
    optimizer: str = "adam"  # sgd: plain, for which [scaling].rule = "adascale" was derived
    api_latency_s: float = (
        0.0  # above 0: each call holds a permit and takes this much longer, to rehearse an API
    )


def parse_options(options: Mapping[str, object]) -> NumpyOptions:
    """Give checked options.

    Raises:
        ConfigError: every problem found.
    """
    problems = check_options(options)
    if problems:
        raise ConfigError([f"[backend.options].{problem}" for problem in problems])
    return NumpyOptions(**options)  # type: ignore[arg-type]  # checked just above


def takes_permits(options: Mapping[str, object]) -> bool:
    """Tell whether calls hold permits: only while an API is rehearsed."""
    return bool(options.get("api_latency_s"))


def check_options(options: Mapping[str, object]) -> list[str]:
    """List the problems of a `[backend.options]` table, one line each that starts with its key."""
    problems = []
    for key, value in options.items():
        problem = _problem(key, value)
        if problem:
            problems.append(f"{key}: {problem}")
    return problems


def _problem(key: str, value: object) -> str:
    known = [field.name for field in fields(NumpyOptions)]
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        return "unknown key; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")
    if key in CHOICES:
        return "" if value in CHOICES[key] else f"got {value!r}; needs {' or '.join(map(repr, CHOICES[key]))}"
    if key == "api_latency_s":
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and isfinite(value) and 0 <= value <= MAX_LATENCY_S:  # type: ignore[arg-type,operator]
            return ""
        return f"got {value!r}; needs seconds from 0 (no API) to {MAX_LATENCY_S:g}"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_WIDTH:
        return ""
    return f"got {value!r}; needs a whole number from 1 to {MAX_WIDTH}"
