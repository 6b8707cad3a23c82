"""`TrainingThrottle`: train as hard as the rest of the machine's work allows.

Measures (or asks your function), decides through `retrain.controllers.throttle`, remembers. It
changes nothing by itself: the caller applies the state.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from numbers import Real
from typing import Any

from retrain.controllers.throttle import (
    Held,
    Load,
    ThrottleLevel,
    ThrottlePolicy,
    ThrottleState,
    decide,
)
from retrain.errors import ConfigError
from retrain.system.load import LoadMeter, Pids, Scope

__all__ = ["ThrottleLevel", "ThrottleState", "TrainingThrottle"]

DEFAULTS = ThrottlePolicy()
READING_LIMIT_S = 10.0  # a reading takes a quarter of a second; a monitor that hangs must not stop a campaign


class LoadError(ConfigError, ValueError):
    """A load function gave what is no load."""


class TrainingThrottle:
    """Turns the machine's load into a level of training.

        throttle = TrainingThrottle()
        batch = throttle.effective_batch_size(64)
        if not throttle.check().should_train:
            throttle.wait_for_idle()

    Args:
        min_level: never less restrictive than this; a level, or its name.
        prefer_gpu: read GPUs as well as processors and memory.
        custom_load_fn: measures instead of us: a load in [0, 1], or None if it is unknown, as it
            also is where the function raises, or has not returned after ten seconds. It is called
            in a thread of its own.
        scope: "foreign" leaves out our own processes; "system" counts everything.
        own_pids: more processes that are ours, with their descendants (a campaign's).
        on_unknown: at least this level while something cannot be read.
        hysteresis: a level is left once the load is this far below its boundary ...
        dwell_s: ... and has stayed so for this many seconds.
        clock: monotonic seconds.
        history_size: states kept for `history`.

    Raises:
        ValueError: an argument out of range.
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
        history_size: int = 1000,
    ) -> None:
        if history_size < 1:
            raise ValueError(f"history_size={history_size}: needs at least 1")
        self._policy = ThrottlePolicy(
            ThrottleLevel(min_level), ThrottleLevel(on_unknown), hysteresis, dwell_s
        )
        self._meter = LoadMeter(scope, prefer_gpu, own_pids)
        self._custom_load_fn = custom_load_fn
        self._clock = clock
        self._reading: Future[Load] | None = None  # one that took too long, and may still be under way
        self._held: Held | None = None
        self._history: deque[tuple[float, ThrottleState]] = deque(maxlen=history_size)

    def check(self) -> ThrottleState:
        """Measure now and decide.

        Raises:
            LoadError: `custom_load_fn` gave anything but a number in [0, 1] or None; a ValueError.
        """
        return self._check(self._policy)

    def should_check(self) -> bool:
        """Whether the present level's interval has passed since the last check."""
        if not self._history:
            return True
        checked_s, state = self._history[-1]
        return self._clock() - checked_s >= state.check_interval_s

    def fleet_load(self) -> float | None:
        """Measure the load in [0, 1] without deciding; None if it is unknown."""
        return self._read().value

    def effective_batch_size(self, base_batch: int) -> int:
        """Scale a batch by the present level, to 1 at least; checks when a check is due.

        Whether to train at all is the state's `should_train`.
        """
        if base_batch < 1:
            raise ValueError(f"base_batch={base_batch}: needs at least 1")
        return max(1, int(base_batch * self._current().batch_multiplier))

    def wait_for_idle(
        self,
        timeout: float | None = None,
        poll: float = 5.0,
        *,
        stop: threading.Event | None = None,
        on_poll: Callable[[ThrottleState], None] | None = None,
    ) -> ThrottleState:
        """Wait until training may go on; Ctrl-C and `stop` end the wait at once.

        Waiting is cheap to end, so calm needs to last for one more poll only, or for the dwell
        if that is shorter.

        Args:
            timeout: seconds; None waits for as long as it takes.
            poll: seconds between checks.
            stop: set it to give up.
            on_poll: is shown every state that keeps us waiting.

        Returns:
            The first state that allows training; or the last one, which does not, after `stop`.

        Raises:
            TimeoutError: still paused.
            ValueError: `poll` is not a positive, finite number, or `timeout` no number.
        """
        if not 0 < poll < math.inf:
            raise ValueError(f"poll={poll}: needs more than 0 seconds, and a finite number")
        if timeout is not None and math.isnan(timeout):
            raise ValueError(f"timeout={timeout}: needs seconds, or None to wait for as long as it takes")
        stop = threading.Event() if stop is None else stop
        policy = dataclasses.replace(self._policy, dwell_s=min(self._policy.dwell_s, poll))
        began_s = self._clock()
        while not (state := self._check(policy)).should_train:
            if on_poll is not None:
                on_poll(state)
            left_s = poll if timeout is None else min(poll, timeout - (self._clock() - began_s))
            if left_s <= 0:
                raise TimeoutError(f"still paused after {timeout:g} s; {state.reason}")
            if stop.wait(left_s):
                break
        return state

    def history(self) -> list[tuple[float, ThrottleState]]:
        """The last states with the clock's seconds, oldest first."""
        return list(self._history)

    def summary(self) -> str:
        """One line about the present level; checks when a check is due."""
        return self._current().summary()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the level, and for how long the load has allowed less."""
        if self._held is None:
            return {"level": None}
        since_s = self._held.calm_since_s
        return {
            "level": self._held.level.value,
            "calm_s": None if since_s is None else self._clock() - since_s,
            "calm_level": self._held.calm_level.value,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`, in another process or on another machine."""
        if state["level"] is None:
            self._held = None
            return
        calm_s = state["calm_s"]
        since_s = None if calm_s is None else self._clock() - calm_s
        self._held = Held(ThrottleLevel(state["level"]), since_s, ThrottleLevel(state["calm_level"]))

    def _current(self) -> ThrottleState:
        return self.check() if self.should_check() else self._history[-1][1]

    def _check(self, policy: ThrottlePolicy) -> ThrottleState:
        load = self._read()
        now_s = self._clock()
        state, self._held = decide(load, now_s, self._held, policy)
        self._history.append((now_s, state))
        return state

    def _read(self) -> Load:
        """Measure in a thread, so that a source that hangs costs its caller ten seconds, once."""
        stuck = self._reading
        if stuck is not None and not stuck.done():
            return _hanging()
        self._reading = _started(self._measure)  # an answer that came too late is of another time
        try:
            return self._reading.result(READING_LIMIT_S)
        except TimeoutError:
            return _hanging()

    def _measure(self) -> Load:
        if self._custom_load_fn is None:
            return self._meter.read()
        try:
            load = self._custom_load_fn()
        except Exception as error:  # noqa: BLE001 - somebody's own code; whatever it was, nothing was read
            raised = f"{type(error).__name__}: {error}"
            return Load(unknown=(f"custom_load_fn ([throttle].load_fn) raised {raised}",))
        if load is None:
            return Load(unknown=("custom_load_fn gave None",))
        if not isinstance(load, Real) or not 0.0 <= load <= 1.0:
            raise LoadError(
                f"custom_load_fn ([throttle].load_fn) gave {load!r}; "
                "a load lies in [0, 1], or is None if unknown"
            )
        return Load({"custom": float(load)})


def _hanging() -> Load:
    return Load(unknown=(f"no reading within {READING_LIMIT_S:g} s",))


def _started(measure: Callable[[], Load]) -> Future[Load]:
    """Run in a thread that keeps no process alive."""
    result: Future[Load] = Future()

    def work() -> None:
        try:
            result.set_result(measure())
        except BaseException as error:  # noqa: BLE001 - raised again where the reading is awaited
            result.set_exception(error)

    threading.Thread(target=work, name="load", daemon=True).start()
    return result
