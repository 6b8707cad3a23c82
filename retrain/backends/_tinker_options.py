"""`[backend.options]` of the tinker backend: types, ranges and defaults, checked without the SDK."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite

from retrain.errors import ConfigError

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class TinkerOptions:
    """How to talk to the API, and for how long to put up with it."""

    tokenizer: str = ""  # local directory or hub id; empty: the one that the API names for the model
    chat_template: bool = False  # show prompts through the tokenizer's chat template
    system_prompt: str = ""  # with chat_template
    beta1: float = 0.9  # Adam's; the API's own defaults
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    requests_at_once: int = 8  # sampling calls of one run that hold a permit or wait for one
    replay_steps: int = 32  # updates remembered to repeat after a lost session; more: a state is saved
    state_days: int = 0  # the API deletes checkpoints after so long; 0: never
    connect_timeout_s: float = 60.0  # to open a session
    call_timeout_s: float = 1800.0  # one call, from its permit to its result
    permit_timeout_s: float = 21600.0  # for a permit; beyond, its holders are taken to be stuck
    first_retry_s: float = 1.0  # before trying again; doubles each time, at random 50 to 100 % of it
    retry_budget_s: float = 1800.0  # for one thing to succeed after its first failure; then the run ends


def parse_options(options: Mapping[str, object]) -> TinkerOptions:
    """Give checked options.

    Raises:
        ConfigError: every problem found.
    """
    problems = check_options(options)
    if problems:
        raise ConfigError([f"[backend.options].{problem}" for problem in problems])
    return TinkerOptions(**options)  # type: ignore[arg-type]  # checked just above


def check_options(options: Mapping[str, object]) -> list[str]:
    """List the problems of a `[backend.options]` table, one line each that starts with its key."""
    problems = [f"{key}: {problem}" for key, value in options.items() if (problem := _problem(key, value))]
    if options.get("system_prompt") and not options.get("chat_template"):
        problems.append("system_prompt: needs chat_template = true, which has a place for it")
    return problems


# key -> least and most; whole numbers where the default is one
_RANGES: Mapping[str, tuple[float, float]] = {
    "beta1": (0, 0.9999),
    "beta2": (0, 0.99999),
    "eps": (0, 1),
    "weight_decay": (0, 1),
    "requests_at_once": (1, 256),
    "replay_steps": (1, 10_000),
    "state_days": (0, 3650),
    "connect_timeout_s": (0.1, DAY_S),
    "call_timeout_s": (0.1, DAY_S),
    "permit_timeout_s": (0.1, 30 * DAY_S),
    "first_retry_s": (0.001, 60),
    "retry_budget_s": (0, DAY_S),
}


def _problem(key: str, value: object) -> str:
    defaults = {field.name: field.default for field in fields(TinkerOptions)}
    if key not in defaults:
        near = difflib.get_close_matches(key, defaults, n=1)
        return "unknown key; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(defaults)}")
    if isinstance(defaults[key], bool):
        return "" if isinstance(value, bool) else f"got {value!r}; needs true or false"
    if isinstance(defaults[key], str):
        return "" if isinstance(value, str) else f"got {value!r}; needs a string"
    least, most = _RANGES[key]
    whole = isinstance(defaults[key], int)
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if fits and isfinite(value) and least <= value <= most:  # type: ignore[arg-type,operator]
        return ""
    return f"got {value!r}; needs a {'whole ' if whole else ''}number from {least:g} to {most:g}"
