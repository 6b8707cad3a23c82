"""How many workers may run now: as planned, fewer while the machine is busy, none while it is in trouble."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from retrain import registry
from retrain.config.schema import Throttle
from retrain.errors import ConfigError
from retrain.plan.matrix import Plan
from retrain.records.run_state import worker_pids
from retrain.system import memory_available_bytes, memory_limit_bytes
from retrain.system.throttle import TrainingThrottle

ASK_FOR_MEMORY_S = 2.0  # for memory that other programs free; a worker's end is noticed anyway
GIB = 2**30
FIGURES = re.compile(r"\d[\d.]*")


@dataclass(frozen=True, slots=True)
class Places:
    """How many workers may run, and when to ask again."""

    count: int
    ask_again_s: float | None  # None: it will not change by itself
    reason: str = ""

    @property
    def gist(self) -> str:
        """The reason without its figures, which differ from one query to the next."""
        return FIGURES.sub("", self.reason)


class Admission(Protocol):
    """Decides how many workers may run. Running workers are never ended for it."""

    def places(self) -> Places:
        """Return how many workers may run now."""
        ...


class Planned:
    """As many as planned."""

    def __init__(self, workers: int) -> None:
        self._places = Places(workers, ask_again_s=None)

    def places(self) -> Places:
        """Return the planned number."""
        return self._places


class ByLoad:
    """The planned number times the present level's batch multiplier; none while paused."""

    def __init__(self, workers: int, throttle: TrainingThrottle) -> None:
        self._workers = workers
        self._throttle = throttle
        self._places: Places | None = None

    def places(self) -> Places:
        """Return the places by the load, measured when a check is due."""
        if self._places is None or self._throttle.should_check():
            state = self._throttle.check()
            count = max(1, int(self._workers * state.batch_multiplier)) if state.should_train else 0
            self._places = Places(count, state.check_interval_s, state.reason)
        return self._places


class ByMemory:
    """No further worker while free memory is under a minimum.

    A worker takes its memory some time after its start: `stagger_seconds` keeps launches apart.
    """

    def __init__(
        self, inner: Admission, least_bytes: float, free_bytes: Callable[[], int] = memory_available_bytes
    ) -> None:
        self._inner = inner
        self._least_bytes = least_bytes
        self._free_bytes = free_bytes

    def places(self) -> Places:
        """Return no places while memory is short."""
        places = self._inner.places()
        free_bytes = self._free_bytes()
        if free_bytes >= self._least_bytes:
            return places
        least, free = self._least_bytes / GIB, free_bytes / GIB
        return Places(
            0, ASK_FOR_MEMORY_S, f"{free:.2f} GiB of memory are free, min_free_memory is {least:.2f}"
        )


def admission_of(plan: Plan, runs: Path) -> Admission:
    """Return the admission that a plan asks for: its workers, the load, the memory.

    Args:
        runs: the directory of the campaign's runs, whose workers' use does not count as other load.
    """
    table = plan.runs[0].config.throttle
    admission: Admission = Planned(plan.workers)
    if table.enabled:
        admission = ByLoad(plan.workers, _throttle(table, runs))
    least_bytes = _least_bytes(plan)
    return ByMemory(admission, least_bytes) if least_bytes > 0 else admission


def check_memory(plan: Plan, source: str) -> None:
    """Refuse a `min_free_memory` above this machine's memory.

    Raises:
        ConfigError: it is larger.
    """
    least_bytes, all_bytes = _least_bytes(plan), memory_limit_bytes()
    if least_bytes > all_bytes:
        raise ConfigError(
            f"{source} [campaign].min_free_memory: got {least_bytes / GIB:.2f} GiB; this machine has "
            f"{all_bytes / GIB:.2f}, so no worker could start; lower it, or set a fraction below 1"
        )


def _least_bytes(plan: Plan) -> float:
    least = plan.campaign.min_free_memory
    return least * memory_limit_bytes() if least < 1 else least


def _throttle(table: Throttle, runs: Path) -> TrainingThrottle:
    load_fn: Callable[[], float | None] | None = None
    if table.load_fn:
        load_fn = registry.find_function("throttle.load_fn", table.load_fn)
    return TrainingThrottle(
        table.min_level,
        table.prefer_gpu,
        load_fn,
        scope=table.scope,
        own_pids=lambda: worker_pids(runs),
        on_unknown=table.on_unknown,
    )
