"""How many workers may run now: as planned, fewer while the machine is busy, none while it is in trouble."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from retrain.backends import MemoryEstimate
from retrain.base.errors import ConfigError
from retrain.control.machine import memory_available_bytes, memory_limit_bytes
from retrain.plan.matrix import Plan
from retrain.records.text import gib

if TYPE_CHECKING:
    from retrain.control.machine.throttle import TrainingThrottle

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Places:
    """How many workers may run, and why fewer than planned."""

    count: int
    reason: str = ""


Admits: TypeAlias = Callable[[], Places]
"""Returns how many workers may run now. Running workers are never ended for it."""


def as_planned(workers: int) -> Admits:
    """Admit as many as planned."""
    places = Places(workers)
    return lambda: places


def by_load(workers: int, throttle: TrainingThrottle) -> Admits:
    """Admit the planned number times the present level's batch multiplier; none while paused."""
    last: Places | None = None

    def places() -> Places:
        nonlocal last
        if last is None or throttle.should_check():
            state = throttle.check()
            count = max(1, int(workers * state.batch_multiplier)) if state.should_train else 0
            last = Places(count, state.reason)
        return last

    return places


def by_memory(
    inner: Admits, least_bytes: float, free_bytes: Callable[[], int] = memory_available_bytes
) -> Admits:
    """Admit no worker while free memory is under a minimum; `stagger_seconds` lets workers take theirs."""

    def places() -> Places:
        admitted, free = inner(), free_bytes()
        if free >= least_bytes:
            return admitted
        least_gib, free_gib = least_bytes / GIB, free / GIB
        return Places(0, f"{free_gib:.2f} GiB of memory are free, min_free_memory is {least_gib:.2f}")

    return places


def admission_of(plan: Plan, runs: Path) -> Admits:
    """Return the admission that a plan asks for; workers in `runs` do not count as other load."""
    table, admission = plan.runs[0].config.throttle, as_planned(plan.workers)
    if table.enabled:
        from retrain.control.machine.throttle import throttle_of  # nor this
        from retrain.records.run_state import worker_pids  # not at the top: `explain` needs none

        admission = by_load(plan.workers, throttle_of(table, lambda: worker_pids(runs)))
    least_bytes = _least_bytes(plan)
    return by_memory(admission, least_bytes) if least_bytes > 0 else admission


def free_memory(device: str) -> int | None:
    """Return the bytes that are free now on this machine, or on its emptiest GPU; None if not known."""
    if device == "cpu":
        return memory_available_bytes()
    from retrain.control.machine.nvidia import known_gpus  # not at the top: few runs need a GPU

    return max((gpu.memory_free_bytes for gpu in known_gpus()), default=None)


def check_fits(needs: Iterable[MemoryEstimate], source: str) -> None:
    """Raise ConfigError for a run that does not fit into what is free, even with the smallest batches."""
    for needed in needs:
        free = free_memory(needed.device)
        if free is not None and needed.smallest > free:
            raise ConfigError(
                f"{source} [model].model: a run takes {gib(needed.smallest)} even with the smallest batches, "
                f"and {gib(free)} are free ({needed.parts()} with those of the file); "
                f"{needed.remedy()}"
            )
        left = free_memory("cpu") or 0
        if needed.is_moved and needed.movable > left:
            raise ConfigError(
                f"{source} [backend.options].teacher_offload: the teacher takes {gib(needed.movable)} of "
                f"this machine's memory, and {gib(left)} are free; name a smaller one"
            )


def check_memory(plan: Plan, source: str) -> None:
    """Raise ConfigError for a `min_free_memory` above this machine's memory."""
    least_bytes, all_bytes = _least_bytes(plan), memory_limit_bytes()
    if least_bytes > all_bytes:
        raise ConfigError(
            f"{source} [campaign].min_free_memory: got {least_bytes / GIB:.2f} GiB; this machine has "
            f"{all_bytes / GIB:.2f}, so no worker could start; lower it, or set a fraction below 1"
        )


def _least_bytes(plan: Plan) -> float:
    least = plan.campaign.min_free_memory
    return least * memory_limit_bytes() if least < 1 else least
