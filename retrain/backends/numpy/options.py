"""`[backend.options]` of the numpy backend: types, ranges and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from retrain.backends.options import Rule, number, one_of, parsed, problems_of, whole

MAX_WIDTH = 4096  # past this, one core needs minutes for a step
MAX_LATENCY_S = 3600.0


@dataclass(frozen=True, slots=True)
class NumpyOptions:
    """Size and arithmetic of the policy, and the API that it may pose as."""

    embedding: int = 24  # numbers per character
    hidden: int = 64  # numbers in the recurrent state
    dtype: str = "float32"  # float64 is slower and checks gradients
    optimizer: str = "adam"  # sgd: plain, for which [scaling].rule = "adascale" was derived
    api_latency_s: float = 0.0  # above 0: calls hold permits and take so much longer, to rehearse an API


_RULES: Mapping[str, Rule] = {
    "embedding": whole(1, MAX_WIDTH),
    "hidden": whole(1, MAX_WIDTH),
    "dtype": one_of("float32", "float64"),
    "optimizer": one_of("adam", "sgd"),
    "api_latency_s": number(0, MAX_LATENCY_S, f"seconds from 0 (no API) to {MAX_LATENCY_S:g}"),
}


def parse_options(options: Mapping[str, object]) -> NumpyOptions:
    """Return checked options.

    Raises:
        ConfigError: every problem found.
    """
    return parsed(NumpyOptions, options, check_options(options))


def takes_permits(options: Mapping[str, object]) -> bool:
    """Whether calls hold permits: only while an API is rehearsed."""
    return bool(options.get("api_latency_s"))


def check_options(options: Mapping[str, object]) -> list[str]:
    """List the problems of a `[backend.options]` table, one line each that starts with its key."""
    return problems_of(options, _RULES)
