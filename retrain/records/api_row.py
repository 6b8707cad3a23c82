"""Parts of a step's row about the API that a run calls: permits, what it billed, and when it did not work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retrain.records.row_parts import measured


@dataclass(frozen=True, slots=True, kw_only=True)
class PermitUse:
    """Waiting for and holding permits, summed over concurrent calls."""

    wait_s: float = measured("s", "waiting for permits", key="permit_wait_s")
    held_s: float = measured("s", "holding permits, of calls that ended in this step", key="permit_held_s")
    permits: int | None = measured(
        "permits", 'how many there are; with `max_concurrent = "auto"`', is_optional=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSummary:
    """What was billed since the row before: evaluations too, and steps that were repeated after a failure."""

    prefill_tokens: int = measured("tokens", "of prompts that were read in full")
    cached_tokens: int = measured(
        "tokens", "of prompts that were read before, as for a group's other rollouts"
    )
    sampled_tokens: int = measured("tokens", "sampled")
    trained_tokens: int = measured("tokens", "of prompts and completions, in each pass that trains on them")
    cost_usd: float | None = measured("$", "what they cost; null where their price is not known")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiPause:
    """Times in which the API had paused all calls of the run, or was down; estimates leave them out."""

    PREFIX: ClassVar[str] = "api_"
    pause_s: float = measured("s", "part of `step_time_s` in which no call went on")
    pauses_s: float = measured("s", "the same in this attempt so far, evaluations and checkpoints included")
