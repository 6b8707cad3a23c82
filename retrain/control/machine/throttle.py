"""`TrainingThrottle`: restrict training while other work needs the machine.

Measures the load (or calls your function), decides through `retrain.control.rules.throttle`, and keeps the
state. It changes nothing by itself: the caller applies the state. The load is the fraction used by other
processes ("foreign") or by all ("system") of what this process may use: its allowed processors, and the quota
and limit of every control group above it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from retrain.base import registry
from retrain.base.errors import ConfigError, InfrastructureError
from retrain.base.event_loop import begun
from retrain.config.schema import ThrottleSection
from retrain.control.machine import (
    Pool,
    Processes,
    cpu_pools,
    descendants,
    machine_cpu,
    machine_memory,
    memory_pools,
    nvidia,
    own_cpu_seconds,
    own_memory_bytes,
    read_processes,
    stalled_fraction,
)
from retrain.control.rules import StateDict
from retrain.control.rules.throttle import Held, Load, ThrottleLevel, ThrottleRule, ThrottleState, decide

if TYPE_CHECKING:
    from concurrent.futures import Future


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
        pools = (machine_cpu(), *cpu_pools())
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
        pools = [machine_memory(), *memory_pools()]
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
    stalled = stalled_fraction(name)
    if stalled is None:
        return {name: taken}
    used = pools[0].used
    others = max(0.0, used - own) / used if used > 0 else 0.0
    return {name: taken, f"{name}_pressure": min(1.0, stalled * others)}


DEFAULTS = ThrottleRule()
READING_LIMIT_S = 10.0  # a reading takes 0.25 s; a monitor that hangs must not stop a campaign


class LoadError(ConfigError, ValueError):
    """A load function returned something else than a number or None."""


class TrainingThrottle:
    """Map the machine's load to a level of training.

        throttle = TrainingThrottle()
        batch = throttle.effective_batch_size(64)
        if not throttle.check().should_train:
            throttle.wait_for_idle()

    Args:
        min_level: the least restrictive level; a level, or its name.
        prefer_gpu: read GPUs as well as processors and memory.
        custom_load_fn: returns a load in [0, 1] instead of the built-in measurement, or None if it is
            unknown. More than 1, as of more work than processors, is saturated. The load is also unknown
            if it is negative or NaN, or if the function raises or takes more than ten seconds. It is
            called in a separate thread.
        scope: "foreign" excludes our own processes; "system" counts all processes.
        own_pids: further processes that are ours, with their descendants (a campaign's).
        on_unknown: the least restrictive level while a resource cannot be read.
        hysteresis: a level is left once the load is this far below its boundary ...
        dwell_s: ... and has stayed so for this many seconds.
        clock: monotonic seconds.
        history_size: most states kept for `history`; None keeps all.
        wall_clock: seconds since 1970, for `history`.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        min_level: ThrottleLevel | str = ThrottleLevel.FULL,
        prefer_gpu: bool = True,
        custom_load_fn: Callable[[], float | None] | None = None,
        *,
        scope: Scope = "foreign",
        own_pids: Pids = (),
        on_unknown: ThrottleLevel | str = DEFAULTS.on_unknown,
        hysteresis: float = DEFAULTS.hysteresis,
        dwell_s: float = DEFAULTS.dwell_s,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        history_size: int | None = None,
    ) -> None:
        if history_size is not None and history_size < 1:
            raise ValueError(f"history_size={history_size}: needs at least 1")
        self._rule = ThrottleRule(ThrottleLevel(min_level), ThrottleLevel(on_unknown), hysteresis, dwell_s)
        self._meter = LoadMeter(scope, prefer_gpu, own_pids)
        self._custom_load_fn = custom_load_fn
        self._clock, self._wall_clock = clock, wall_clock
        self._checked_s = -math.inf
        self._reading: Future[Load] | None = None  # the last, perhaps still running
        self._held: Held | None = None
        self._history: deque[tuple[float, ThrottleState]] = deque(maxlen=history_size)

    def check(self) -> ThrottleState:
        """Measure now and decide; raise LoadError if `custom_load_fn` returned no number."""
        return self._check(self._rule)

    def should_check(self) -> bool:
        """Whether the current level's check interval has passed since the last check."""
        if not self._history:
            return True
        state = self._history[-1][1]
        return self._clock() - self._checked_s >= state.check_interval_s

    def current(self) -> ThrottleState:
        """Return the state of the last check; check first if a check is due."""
        return self.check() if self.should_check() else self._history[-1][1]

    def fleet_load(self) -> float | None:
        """Measure the load in [0, 1] without deciding; None if it is unknown."""
        return self._read().value

    def effective_batch_size(self, base_batch: int) -> int:
        """Return a batch scaled by the current level, at least 1; checks when a check is due."""
        if base_batch < 1:
            raise ValueError(f"base_batch={base_batch}: needs at least 1")
        return max(1, int(base_batch * self.current().batch_multiplier))

    def wait_for_idle(
        self,
        timeout: float | None = None,
        poll: float = 5.0,
        *,
        stop: threading.Event | None = None,
        on_poll: Callable[[ThrottleState], None] | None = None,
    ) -> ThrottleState:
        """Wait until training may continue; Ctrl-C and `stop` end the wait at once.

        A lower load needs to last for one poll only, or for the dwell time if that is shorter.

        Args:
            timeout: seconds; None waits without limit.
            poll: seconds between checks.
            stop: event that ends the wait.
            on_poll: called with every state that does not allow training.

        Returns:
            The first state that allows training; or the last one, which does not, after `stop`.

        Raises:
            TimeoutError: still paused after `timeout` seconds.
            ValueError: `poll` is not a positive, finite number, or `timeout` is NaN.
        """
        if not 0 < poll < math.inf:
            raise ValueError(f"poll={poll}: needs a finite number of seconds above 0")
        if timeout is not None and math.isnan(timeout):
            raise ValueError(f"timeout={timeout}: needs a number of seconds, or None to wait without limit")
        stop = stop or threading.Event()
        rule = dataclasses.replace(self._rule, dwell_s=min(self._rule.dwell_s, poll))
        began_s = self._clock()
        while not (state := self._check(rule)).should_train:
            if on_poll is not None:
                on_poll(state)
            left_s = poll if timeout is None else min(poll, timeout - (self._clock() - began_s))
            if left_s <= 0:
                raise TimeoutError(f"still paused after {timeout:g} s; {state.reason}")
            if stop.wait(left_s):
                break
        return state

    def history(self) -> list[tuple[float, ThrottleState]]:
        """Return all states with their times in seconds since 1970, oldest first."""
        return list(self._history)

    def summary(self) -> str:
        """Return a one-line summary of the current level; checks when a check is due."""
        return self.current().summary()

    def state_dict(self) -> StateDict:
        """Return the state for a resumed run: the level, and for how long the load has been lower."""
        held = self._held
        if held is None:
            return {"level": None}
        calm_s = None if held.calm_since_s is None else self._clock() - held.calm_since_s
        return {"level": held.level.value, "calm_s": calm_s, "calm_level": held.calm_level.value}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a `state_dict`, also in another process or on another machine."""
        self._held = None
        if state["level"] is not None:
            since_s = None if state["calm_s"] is None else self._clock() - state["calm_s"]
            self._held = Held(ThrottleLevel(state["level"]), since_s, ThrottleLevel(state["calm_level"]))

    def _check(self, rule: ThrottleRule) -> ThrottleState:
        load = self._read()
        now_s = self._clock()
        state, self._held = decide(load, now_s, self._held, rule)
        self._checked_s = now_s
        self._history.append((self._wall_clock(), state))
        return state

    def _read(self) -> Load:
        """Measure in a thread, so that a source that hangs blocks the caller once, for ten seconds."""
        if self._reading is None or self._reading.done():  # a late result of an earlier reading is outdated
            self._reading = begun(self._measure)
            with contextlib.suppress(TimeoutError):
                return self._reading.result(READING_LIMIT_S)
        return Load(unknown=(f"no reading within {READING_LIMIT_S:g} s",))

    def _measure(self) -> Load:
        if self._custom_load_fn is None:
            return self._meter.read()
        try:
            load = self._custom_load_fn()
        except Exception as error:  # noqa: BLE001 - user code; after any error the load is unknown
            raised = f"{type(error).__name__}: {error}"
            return Load(unknown=(f"custom_load_fn ([throttle].load_fn) raised {raised}",))
        if load is None:
            return Load(unknown=("custom_load_fn ([throttle].load_fn) returned None",))
        if not isinstance(load, Real):
            raise LoadError(
                f"custom_load_fn ([throttle].load_fn) returned {load!r}; "
                "needs a number in [0, 1], or None if unknown"
            )
        if not load >= 0.0:  # NaN is neither
            return Load(unknown=(f"custom_load_fn ([throttle].load_fn) returned {float(load):g}",))
        return Load({"custom": float(load)})


def throttle_of(table: ThrottleSection, own_pids: Pids) -> TrainingThrottle:
    """Return the throttle that `[throttle]` describes."""
    return TrainingThrottle(
        table.min_level,
        table.prefer_gpu,
        registry.find_function("throttle.load_fn", table.load_fn) if table.load_fn else None,
        scope=table.scope,
        own_pids=own_pids,
        on_unknown=table.on_unknown,
        history_size=1,  # a run of millions of steps asks for none
    )
