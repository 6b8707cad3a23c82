"""How many workers may run now: the plan's number, or fewer while the machine is busy with other work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from retrain import registry
from retrain.config.schema import Throttle
from retrain.plan.matrix import Plan
from retrain.throttle import TrainingThrottle


@dataclass(frozen=True, slots=True)
class Places:
    """How many workers may run, and when to ask again."""

    count: int
    ask_again_s: float | None  # None: it will not change by itself
    reason: str = ""


class Admission(Protocol):
    """Says how many workers may run. Workers that run already are never ended for it."""

    def places(self) -> Places:
        """Look, and decide."""
        ...


class Planned:
    """As many as planned."""

    def __init__(self, workers: int) -> None:
        self._places = Places(workers, ask_again_s=None)

    def places(self) -> Places:
        """Give the planned number."""
        return self._places


class ByLoad:
    """The planned number times the present level's batch multiplier; none while paused."""

    def __init__(self, workers: int, throttle: TrainingThrottle) -> None:
        self._workers = workers
        self._throttle = throttle
        self._places: Places | None = None

    def places(self) -> Places:
        """Look at the load when a look is due."""
        if self._places is None or self._throttle.should_check():
            state = self._throttle.check()
            count = max(1, int(self._workers * state.batch_multiplier)) if state.should_train else 0
            self._places = Places(count, state.check_interval_s, state.reason)
        return self._places


def admission_of(plan: Plan) -> Admission:
    """Give the admission that a plan's [throttle] asks for."""
    table = plan.runs[0].config.throttle
    return ByLoad(plan.workers, _throttle(table)) if table.enabled else Planned(plan.workers)


def _throttle(table: Throttle) -> TrainingThrottle:
    load_fn: Callable[[], float | None] | None = None
    if table.load_fn:
        load_fn = registry.find_function("throttle.load_fn", table.load_fn)
    return TrainingThrottle(
        table.min_level, table.prefer_gpu, load_fn, scope=table.scope, on_unknown=table.on_unknown
    )
