"""What the API answers that the SDK does not pass on: refusals and pauses of calls, and that it is down.

The SDK retries a refused request, keeps polling for a result that the API has paused (408, with the state of
its queue), and reports neither that nor a failed connection for minutes. Here all are reported at once, and
the time in which the API works on none of a run's calls is summed: it is not the time of a call or a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from tinker import APIConnectionError, APIStatusError

from retrain.backends.progress import BackendProgress, OutageProgress
from retrain.control.rules.concurrency_limit import OVERLOAD, CallFacts

OUR_LIMIT = "rate limit"
PAUSES = {"paused_capacity": "capacity", "paused_rate_limit": OUR_LIMIT}  # by `queue_state`
UNAVAILABLE = (502, 503, 504)
LOGGED_AFTER_S = 3.0  # of a server that is down: shorter failures are common
log = logging.getLogger(__name__)


class Stopwatch:
    """Adds up the spans in which something is on."""

    def __init__(self) -> None:
        self.since_s: float | None = None
        self._before_s = self._stopped_at_s = 0.0

    def turn(self, *, on: bool, since_s: float) -> bool:
        """Turn on, as of a time in the past, or off now; return whether that is a change."""
        if on == (self.since_s is not None):
            return False
        if self.since_s is None:
            self.since_s = max(since_s, self._stopped_at_s)
        else:
            self._before_s, self._stopped_at_s, self.since_s = self.total_s(), time.monotonic(), None
        return True

    def lasts_s(self) -> float:
        """Return the length of the present span; 0 if it is off."""
        return 0.0 if self.since_s is None else time.monotonic() - self.since_s

    def total_s(self) -> float:
        return self._before_s + self.lasts_s()


@dataclass(eq=False)
class ApiCall:
    """A call in progress. Its requests find it by their context, which the SDK's own event loop inherits."""

    kind: str
    began_s: float = field(default_factory=time.monotonic)
    is_disturbed: bool = False  # it was refused or paused
    is_over: bool = False

    def facts(self, *, overloaded: bool = False, waited: bool = False) -> CallFacts:
        return CallFacts(self.kind, time.monotonic() - self.began_s, overloaded, waited)


CALL: ContextVar[ApiCall | None] = ContextVar("CALL", default=None)


def _call() -> ApiCall | None:
    """Return the call in progress here; None in the SDK's heartbeat, which goes on after it."""
    call = CALL.get()
    return None if call is None or call.is_over else call


class Outages:
    """Pauses and failures of one run's API. Used from any thread."""

    def __init__(
        self,
        observe: Callable[[BackendProgress], None],
        observe_call: Callable[[CallFacts], None] | None = None,
    ) -> None:
        """Report outages to `observe`, and refusals and pauses for our own rate limit to `observe_call`."""
        self._observe, self._observe_call = observe, observe_call
        self._lock = threading.Lock()
        self._pauses: dict[object, str | None] = {}  # task -> why its call is paused; None: not known
        self._said: dict[object, str] = {}  # by the same, with status 200
        self._failure = ""  # of a server that is down
        self._calls_fail = False  # and not only the SDK's heartbeat
        self._is_logged = False  # that it is down
        self._shown: OutageProgress | None = None
        self._paused, self._down, self._out = Stopwatch(), Stopwatch(), Stopwatch()

    def paused_s(self) -> float:
        """Return how long all calls have been paused so far."""
        with self._lock:
            return self._paused.total_s()

    def out_s(self) -> float:
        """Return how long all calls have been paused, or the API down, so far."""
        with self._lock:
            return self._out.total_s()

    @contextlib.contextmanager
    def call(self, kind: str) -> Iterator[ApiCall]:
        """Attribute the requests that are made within to a call."""
        call = ApiCall(kind)
        before = CALL.set(call)
        try:
            yield call
        finally:
            CALL.reset(before)
            call.is_over = True

    def answered(self, status: int) -> None:
        """Note the status of a response."""
        if status in OVERLOAD:
            self._disturb(is_load=True)

    def _disturb(self, *, is_load: bool) -> None:
        if (call := _call()) is None:
            return
        call.is_disturbed = True
        if is_load:
            self.report(call.facts(overloaded=True))

    def report(self, facts: CallFacts) -> None:
        """Tell what a call says of the API's load."""
        if self._observe_call is not None:
            self._observe_call(facts)

    @contextlib.contextmanager
    def request(self, *, is_poll: bool) -> Iterator[None]:
        """Watch a request of the SDK; `is_poll` if it is for the result of a call."""
        began_s, task = time.monotonic(), None
        with contextlib.suppress(RuntimeError):  # outside of an event loop
            task = asyncio.current_task()
        self._said.pop(task, None)
        if is_poll:
            self._watch(task)
        try:
            yield
        except APIStatusError as error:
            if error.status_code in UNAVAILABLE:
                self.failed(f"status {error.status_code}", began_s)
            else:
                if pause := _pause_of(error):
                    self._watch(task)
                self._answered(task, pause, began_s)
            raise
        except APIConnectionError as error:
            self.failed(type(error.__cause__ or error).__name__, began_s)
            raise
        self._answered(task, self._said.pop(task, ""), began_s)
        if not is_poll:
            self._forget(task)

    def _watch(self, task: asyncio.Task[Any] | None) -> None:
        """Have a task count among those that wait for the API, until it ends."""
        with self._lock:
            if task is None or task in self._pauses:
                return
            self._pauses[task] = None
        task.add_done_callback(self._forget)

    def said(self, content: object) -> None:
        """Note the content of an answer with status 200, which may be that the result is not there yet."""
        if isinstance(content, dict) and content.get("type") == "try_again":
            self._said[asyncio.current_task()] = PAUSES.get(content.get("queue_state", ""), "")

    def failed(self, why: str, began_s: float) -> None:
        """Note that a request, begun at a time, was not answered, or not by the API."""
        with self._lock:
            self._failure, self._calls_fail = why, self._calls_fail or _call() is not None
            self._judge(began_s)

    def _answered(self, result: object, pause: str, began_s: float) -> None:
        with self._lock:
            if _call() is not None or not self._calls_fail:  # a heartbeat that is answered helps no call
                self._failure, self._calls_fail = "", False
            is_limited = pause == OUR_LIMIT and self._pauses.get(result) != OUR_LIMIT
            if result in self._pauses:
                if not pause:  # what was said of the others before is out of date
                    self._pauses = dict.fromkeys(self._pauses)
                self._pauses[result] = pause
            self._judge(began_s)
        if pause:
            self._disturb(is_load=is_limited)

    def _forget(self, result: object) -> None:
        with self._lock:
            self._pauses.pop(result, None)
            self._said.pop(result, None)
            self._judge(time.monotonic())

    def _judge(self, since_s: float) -> None:
        """Decide whether the API is paused or down, and report a change. Needs the lock."""
        pauses = self._pauses.values()
        pause = "" if "" in pauses else next(filter(None, pauses), "")
        lasted_s, down_s = self._paused.lasts_s(), self._down.lasts_s()
        if self._paused.turn(on=bool(pause), since_s=since_s):
            log.warning("the API %s", f"pauses: {pause}" if pause else f"paused for {lasted_s:.0f} s")
        self._down.turn(on=bool(self._failure), since_s=since_s)
        if self._is_logged and not self._failure:
            log.warning("the API answers again, after %.0f s", down_s)
            self._is_logged = False
        elif not self._is_logged and self._down.lasts_s() >= LOGGED_AFTER_S:
            log.warning("the API has been down for %.0f s (%s)", self._down.lasts_s(), self._failure)
            self._is_logged = True
        self._out.turn(on=bool(pause or self._failure), since_s=since_s)
        shown = self._progress(pause)
        if shown != self._shown:
            self._shown = shown
            self._observe(shown or OutageProgress())

    def _progress(self, pause: str) -> OutageProgress | None:
        """Return what is wrong with the API, and since when; None if it works."""
        if self._failure and self._down.since_s is not None:
            return OutageProgress("API down", self._failure, self._down.since_s)
        if pause and self._paused.since_s is not None:
            return OutageProgress("API paused", pause, self._paused.since_s)
        return None


def _pause_of(error: APIStatusError) -> str:
    """Return why the API has paused a call, by its answer; "" if it has not."""
    if error.status_code == 402:  # which the SDK tries again for an hour
        return "payment required"
    if error.status_code != 408:
        return ""
    try:
        state = error.response.json().get("queue_state")
    except (ValueError, AttributeError):
        return ""
    return PAUSES.get(state, "")
