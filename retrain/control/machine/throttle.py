"""`TrainingThrottle`: restrict training while other work needs the machine.

Measures the load (or calls your function), decides through `retrain.control.rules.throttle`, and keeps the
state. It changes nothing by itself: the caller applies the state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING

from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.event_loop import begun
from retrain.config.schema import ThrottleSection
from retrain.control.machine.load import LoadMeter, Pids, Scope
from retrain.control.rules import StateDict
from retrain.control.rules.throttle import Held, Load, ThrottleLevel, ThrottleRule, ThrottleState, decide

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["ThrottleLevel", "ThrottleState", "TrainingThrottle"]

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
