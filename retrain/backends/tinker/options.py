"""`[backend.options]` of the tinker backend: types, ranges and defaults, checked without the SDK."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from retrain.backends.options import TEXT, TRUTH, Rule, number, parsed, problems_of, whole

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class TinkerOptions:
    """Tokenizer, optimizer, timeouts and retries of the API."""

    tokenizer: str = ""  # local directory or hub id; empty: as the API names it for the model
    chat_template: bool = False  # apply the tokenizer's chat template to prompts
    system_prompt: str = ""  # with chat_template
    beta1: float = 0.9  # of Adam; the API's defaults
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    requests_at_once: int = 8  # sampling calls of one run that hold or wait for a permit
    replay_steps: int = 32  # updates kept for replay after a lost session; beyond that, a state is saved
    state_days: int = 0  # days until the API deletes a checkpoint; 0: never
    connect_timeout_s: float = 60.0  # to open a session
    call_timeout_s: float = 1800.0  # one call, from permit to result
    permit_timeout_s: float = 21600.0  # wait for a permit; after that, its holders are considered stuck
    first_retry_s: float = 1.0  # backoff; doubles each time, with 50 to 100 % jitter
    retry_budget_s: float = 1800.0  # from an operation's first failure until the run ends


_RULES: Mapping[str, Rule] = {
    "tokenizer": TEXT,
    "chat_template": TRUTH,
    "system_prompt": TEXT,
    "beta1": number(0, 0.9999),
    "beta2": number(0, 0.99999),
    "eps": number(0, 1),
    "weight_decay": number(0, 1),
    "requests_at_once": whole(1, 256),
    "replay_steps": whole(1, 10_000),
    "state_days": whole(0, 3650),
    "connect_timeout_s": number(0.1, DAY_S),
    "call_timeout_s": number(0.1, DAY_S),
    "permit_timeout_s": number(0.1, 30 * DAY_S),
    "first_retry_s": number(0.001, 60),
    "retry_budget_s": number(0, DAY_S),
}


def parse_options(options: Mapping[str, object]) -> TinkerOptions:
    """Return checked options.

    Raises:
        ConfigError: every problem found.
    """
    return parsed(TinkerOptions, options, check_options(options))


def check_options(options: Mapping[str, object]) -> list[str]:
    """Return the problems of a `[backend.options]` table, one line each, starting with the key."""
    problems = problems_of(options, _RULES)
    if options.get("system_prompt") and not options.get("chat_template"):
        problems.append("system_prompt: needs chat_template = true")
    return problems
