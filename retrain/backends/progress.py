"""How far a backend is with what it was asked for, as it tells `BackendSpec.observe`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from retrain.records.row_parts import EngineUse


@dataclass(frozen=True, slots=True)
class SamplingProgress:
    """How far a call of `sample` is."""

    rollouts: int  # asked for
    finished: int
    tokens: int  # sampled so far, in all
    longest: int  # tokens of the longest rollout so far
    time_s: float  # since the call began

    def __str__(self) -> str:
        speed = self.tokens / self.time_s if self.time_s > 0 else 0.0
        return (
            f"{self.finished} of {self.rollouts} done, {self.tokens:,} tokens, {speed:,.0f}/s, "
            f"longest {self.longest:,}"
        )


@dataclass(frozen=True, slots=True)
class EpisodeProgress:
    """How far episodes are that are played together."""

    episodes: int
    finished: int
    turns: int  # sampled so far, in all
    tokens: int
    time_s: float  # since they began

    def __str__(self) -> str:
        speed = self.tokens / self.time_s if self.time_s > 0 else 0.0
        return (
            f"{self.finished} of {self.episodes} episodes done, {self.turns:,} turns, "
            f"{self.tokens:,} tokens, {speed:,.0f}/s"
        )


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """How far an update is."""

    parts: int  # micro-batches of the whole update
    done: int

    def __str__(self) -> str:
        return f"micro-batch {self.done} of {self.parts} done"


@dataclass(frozen=True, slots=True)
class StartProgress:
    """What a backend waits for before it can begin, or go on: a phase of its own."""

    phase: str  # such as `starting vLLM`
    time_s: float

    def __str__(self) -> str:
        return f"{self.time_s:.0f} s"


@dataclass(frozen=True, slots=True)
class OutageProgress:
    """A service that works on none of the run's calls; without a phase, it does again."""

    phase: str = ""  # such as `API paused`
    why: str = ""
    since_s: float = 0.0  # by `time.monotonic`


BackendProgress: TypeAlias = (
    "SamplingProgress | EpisodeProgress | TrainingProgress | StartProgress | OutageProgress | EngineUse"
)
