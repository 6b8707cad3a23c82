"""What a backend tells of calls that take long, and sums of it over calls at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:  # every command imports this module
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


def ignore_progress(progress: BackendProgress) -> None:
    """Do nothing."""
    del progress


class Drawing(Protocol):
    """A completion in progress."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def is_done(self) -> bool: ...


Tell = Callable[[Sequence[Drawing]], None]


class CallsProgress:
    """Sums up the calls that are in progress, which may be in several threads."""

    def __init__(self, observe: Callable[[SamplingProgress], None], every_s: float = 0.5) -> None:
        self._observe, self._every_s = observe, every_s
        self._lock = threading.Lock()
        self._calls: dict[object, tuple[float, Sequence[Drawing]]] = {}  # when each began, and its rows
        self._told_s = time.monotonic()

    def is_busy(self) -> bool:
        """Whether a call has begun and not ended."""
        return bool(self._calls)

    @contextmanager
    def call(self) -> Iterator[Tell]:
        """Return what tells the rows of a call, as often as it likes, until the call ends."""
        call, began_s = object(), time.monotonic()
        with self._lock:
            self._calls[call] = (began_s, ())

        def tell(rows: Sequence[Drawing]) -> None:
            now_s = time.monotonic()
            with self._lock:
                self._calls[call] = (began_s, rows)
                if now_s - self._told_s >= self._every_s:
                    self._told_s = now_s
                    self._observe(self._summary(now_s))

        try:
            yield tell
        finally:
            with self._lock:
                self._calls.pop(call, None)

    def _summary(self, now_s: float) -> SamplingProgress:
        rows = [row for _, rows in self._calls.values() for row in rows]
        lengths, finished = [len(row.tokens) for row in rows], sum(row.is_done for row in rows)
        first_s = min(began_s for began_s, _ in self._calls.values())
        return SamplingProgress(len(lengths), finished, sum(lengths), max(lengths), now_s - first_s)
