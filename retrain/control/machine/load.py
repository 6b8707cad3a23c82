"""Machine load: the fraction of resources used by other processes ("foreign") or by all ("system").

The fraction is relative to what this process may use: its allowed processors, and the quota and limit of
every control group above it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from retrain.base.errors import InfrastructureError
from retrain.control import machine as system
from retrain.control.machine import Pool, nvidia
from retrain.control.machine.processes import (
    Processes,
    descendants,
    own_cpu_seconds,
    own_memory_bytes,
    read_processes,
)
from retrain.control.rules.throttle import Load

Scope: TypeAlias = Literal["foreign", "system"]
Pids: TypeAlias = Collection[int] | Callable[[], Iterable[int]]

WINDOW_S = 0.25  # 25 ticks of 10 ms: the shortest window with an error of a few percent
STALE_S = 60.0  # an older baseline would hide recent changes
UNREADABLE = (OSError, ValueError, LookupError)  # missing or unexpected files
MEMORY_SLACK = 0.5  # fraction used by others that does not count as load, since unused memory has no cost


@dataclass(frozen=True, slots=True)
class CpuSnapshot:
    """Counters at one time: the machine's first, then those of the groups with a quota."""

    at_s: float
    pools: tuple[Pool, ...]
    processes: Processes
    own: frozenset[int]


class LoadMeter:
    """Read the machine's load, as the difference of two counter readings; the last reading is kept.

    Args:
        scope: "foreign" excludes our own processes; "system" counts all processes.
        gpu: also read GPUs.
        own_pids: further processes that are ours, with all their descendants (such as those of a
            campaign), or a function that returns them. A process once counted as ours remains
            ours when its parent ends.
    """

    def __init__(self, scope: Scope = "foreign", gpu: bool = True, own_pids: Pids = ()) -> None:
        if scope not in get_args(Scope):
            raise ValueError(f"scope={scope!r}: needs one of {', '.join(get_args(Scope))}")
        self._scope = scope
        self._gpu = gpu
        self._own_pids = own_pids
        self._seen: dict[int, float] = {}
        self._before: CpuSnapshot | None = None
        self._last: Load | None = None

    def read(self) -> Load:
        """Measure since the last reading, which is returned again within a quarter of a second.

        The first reading, and one after more than a minute, takes a quarter of a second.
        """
        before = self._before
        if self._last and before and time.monotonic() - before.at_s < WINDOW_S:
            return self._last
        try:
            if before is None or time.monotonic() - before.at_s > STALE_S:
                before = self._snapshot()
                time.sleep(WINDOW_S)
            after = self._snapshot()
        except UNREADABLE as error:
            return Load(unknown=(f"processors: {error!r}",))
        self._before, self._last = after, self._since(before, after)
        return self._last

    def _since(self, before: CpuSnapshot, after: CpuSnapshot) -> Load:
        readers: dict[str, Callable[[], dict[str, float]]] = {
            "processors": lambda: self._processors(before, after),
            "memory": lambda: self._memory(after),
            "GPU": lambda: self._gpus(after),
        }
        parts: dict[str, float] = {}
        unknown: list[str] = []
        for name, read in readers.items():
            try:
                parts |= read()
            except InfrastructureError as error:
                unknown.append(str(error))
            except UNREADABLE as error:
                unknown.append(f"{name}: {error!r}")
        return Load(parts, tuple(unknown))

    def _snapshot(self) -> CpuSnapshot:
        at_s = time.monotonic()
        pools = (system.machine_cpu(), *system.cpu_pools())
        processes = read_processes()
        return CpuSnapshot(at_s, pools, processes, frozenset(self._own(processes)))

    def _own(self, processes: Processes) -> set[int]:
        if self._scope == "system":
            return set()
        pids = self._own_pids() if callable(self._own_pids) else self._own_pids
        seen = {pid for pid in self._seen if pid in processes and processes[pid].start == self._seen[pid]}
        tree = descendants({os.getpid(), *pids, *seen}, processes)
        self._seen = {pid: processes[pid].start for pid in tree}
        return tree

    def _processors(self, before: CpuSnapshot, after: CpuSnapshot) -> dict[str, float]:
        own_s = own_cpu_seconds(before.processes, before.own, after.processes, after.own)
        elapsed_s = after.at_s - before.at_s
        rates = [
            Pool(new.limit, (new.used - old.used) / elapsed_s)
            for old, new in zip(before.pools, after.pools, strict=True)
        ]
        return _with_pressure("cpu", rates, own_s / elapsed_s, taken_fraction(rates, own_s / elapsed_s))

    def _memory(self, now: CpuSnapshot) -> dict[str, float]:
        own_bytes = own_memory_bytes(now.own)
        pools = [system.machine_memory(), *system.memory_pools()]
        scarce = max(0.0, taken_fraction(pools, own_bytes) - MEMORY_SLACK) / (1 - MEMORY_SLACK)
        return _with_pressure("memory", pools, own_bytes, scarce)

    def _gpus(self, now: CpuSnapshot) -> dict[str, float]:
        read = nvidia.gpus() if self._gpu else []
        if self._scope == "system":
            return nvidia.scarcest(nvidia.taken(gpu) for gpu in read)
        import psutil  # not at the top: takes 40 ms, and few machines have GPUs

        return nvidia.scarcest(nvidia.taken_by_others(gpu, now.own, psutil.pid_exists) for gpu in read)


def taken_fraction(pools: Sequence[Pool], own: float) -> float:
    """Return the fraction of our capacity that other processes use.

    `pools` are those of the machine and of the groups above us; `own` is our use in the same unit, 0 to count
    everything. What is available to us is the smallest of what others leave of each pool's limit; on an idle
    machine, the smallest limit. So others do not count while our quota fits into the rest of the machine.
    """
    capacity = min(pool.limit for pool in pools)
    left = min(pool.limit - max(0.0, pool.used - own) for pool in pools)
    return min(1.0, max(0.0, 1.0 - left / capacity))


def _with_pressure(name: str, pools: Sequence[Pool], own: float, taken: float) -> dict[str, float]:
    """Add how long tasks stall, by others' share: the demand that an even share hides, and thrashing."""
    stalled = system.stalled_fraction(name)
    if stalled is None:
        return {name: taken}
    used = pools[0].used
    others = max(0.0, used - own) / used if used > 0 else 0.0
    return {name: taken, f"{name}_pressure": min(1.0, stalled * others)}
