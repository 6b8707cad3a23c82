"""API calls: each holds one of the campaign's permits, has a timeout, and is metered and retried.

The kind of its failure, a `Fault`, decides whether a call is retried. The SDK retries a refused request,
keeps polling for a result that the API has paused (408, with the state of its queue), and reports neither
that nor a failed connection for minutes. `Outages` reports all at once, and sums the time in which the API
works on none of a run's calls: it is not the time of a call or a step.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeVar

import httpx
from tinker import APIConnectionError, APIStatusError, RequestFailedError, TinkerError
from tinker.lib.retry_handler import RetryConfig
from tinker.lib.retryable_exception import RetryableException
from tinker.types import RequestErrorCategory

from retrain.backends import BackendSpec
from retrain.backends.metering import NOTHING
from retrain.backends.progress import BackendProgress, OutageProgress
from retrain.backends.tinker import TinkerOptions
from retrain.backends.tinker.server_facts import ServerFacts
from retrain.base.errors import ConfigError, InfrastructureError, RunFailedError
from retrain.control.rules.concurrency_limit import OVERLOAD, WAITED_S, CallFacts
from retrain.records.spending import Tokens

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")

LONGEST_RETRY_S = 60.0
SHORTEST_WAIT_S = 0.05  # the time left for a call stays the same during a pause
MOST_LOSSES = 3  # of one operation: of its sampler, its model and its session
# of sampling clients: by itself the SDK samples again without a word, and the API bills both; and it gives up
# after two hours, those of a pause included
ONCE = RetryConfig(enable_retry_logic=False, enable_stuck_detection=False)
log = logging.getLogger(__name__)

# exceptions that pass through the SDK; its own checks raise plain ValueError and RuntimeError
FAULTS: tuple[type[Exception], ...] = (
    TinkerError,
    RetryableException,
    httpx.HTTPError,
    OSError,  # includes TimeoutError and ConnectionError
    ValueError,
    RuntimeError,
    AssertionError,  # a response lacks what the SDK relies on
)
REFUSALS = (400, 401, 402, 403, 422, 429)  # nothing was done
SUBMITS = ("forward_backward", "optim_step", "asample")  # what the SDK sends again when no answer comes
CONFLICT = 409
UPDATE, SAVE = "update", "save"  # kinds of calls
_STATUS = re.compile(r"\bstatus[ =](\d{3})\b")  # the SDK reports the status of fetched results only as text
# what servers say of something that they had; ids, which may contain such words, are left out
_GONE = (
    r"{what}\b(?![-:])[^/]{{0,200}}?"
    r"\b(?:not (?:loaded|found|active|known)|no longer|expired|does not exist|unloaded|evicted)"
    r"|\b(?:no|unknown|expired) {what}\b(?![-:])"
)
_LOST = re.compile(_GONE.format(what=r"\b(?:model|session|sampler)"), re.IGNORECASE)
_LOST_SESSION = re.compile(_GONE.format(what=r"\bsession"), re.IGNORECASE)
_FULL = re.compile(r"maximum number of (?:lora )?(?:adapters|models)", re.IGNORECASE)
_OLD = re.compile(r"only supports as proto|predates proto|proto deserialization failed", re.IGNORECASE)
_TOO_LONG = re.compile(r"context (?:window|length|size)|prompt (?:is )?too long", re.IGNORECASE)
_NO_ROUTE = re.compile(r"'detail': 'Not Found'|not (?:supported|implemented)", re.IGNORECASE)

_TAKEN = re.compile(r"(?<!longer )\bexists\b|already (?:taken|used|saved)", re.IGNORECASE)

OUR_LIMIT = "rate limit"
PAUSES = {"paused_capacity": "capacity", "paused_rate_limit": OUR_LIMIT}  # by `queue_state`
UNAVAILABLE = (502, 503, 504)
LOGGED_AFTER_S = 3.0  # of a server that is down: shorter failures are common


class ResentError(RuntimeError):
    """The SDK sent a request again, and the server may have done it each time."""


class NameTakenError(RuntimeError):
    """The server has a state of the name already. The SDK would ask again for five minutes."""


class ApiCalls:
    """One run's API calls, without blocking the event loop."""

    def __init__(self, spec: BackendSpec, options: TinkerOptions) -> None:
        self._meter, self._permit = spec.meter, spec.permit
        self.outages = Outages(spec.observe, spec.observe_call)
        self.options = options
        self.server = ServerFacts()  # as far as is known
        self.in_flight: set[asyncio.Event] = set()  # one per call or wait for a permit, set at its end

    async def once(self, kind: str, operation: Callable[[], Awaitable[T]]) -> T:
        """Make one call under a permit; a TimeoutError if its result takes too long."""
        asked_s = time.monotonic()
        async with self._one_permit():
            return await self._observed(kind, operation, time.monotonic() - asked_s)

    async def billed(
        self, at_most: Tokens, call: Callable[[], Awaitable[T]], count: Callable[[T], Tokens] | None = None
    ) -> T:
        """Make a call and `count` what it was billed, by default all of it; nothing if the API refused it.

        What was sent again may have been billed as often, unless the server is known to do it once.
        """
        with self._meter.call(at_most) as billed_call:
            try:
                result = await call()
            except FAULTS as error:
                # the status of a request is an error of its own, that of a poll for its result a text: only
                # the former says that nothing was done
                is_refused = isinstance(error, APIStatusError) and error.status_code in REFUSALS
                billed_call.billed = NOTHING if is_refused else None
                raise
            billed_call.billed = count(result) if count else at_most
        for _ in range(self._times_again()):
            self._meter.doubt(at_most)
        return result

    def _times_again(self) -> int:
        """Return how often the server may have done the present call's request beside the first time."""
        call = _call()
        return 0 if call is None or self.server.repeats else max(call.sent - 1, 0)

    async def pair(
        self, kind: str, first: Callable[[], Awaitable[A]], second: Callable[[], Awaitable[B]]
    ) -> tuple[A, B]:
        """Make two calls that the API processes in order, concurrently if a second permit is free.

        The second is submitted when the first is done or another permit is acquired, whichever is
        earlier. The first call never waits for the second permit, so runs cannot deadlock.
        """
        async with self._one_permit(), AsyncExitStack() as permits:
            earlier = asyncio.ensure_future(self._observed(kind, first, 0.0))
            spare = asyncio.ensure_future(permits.enter_async_context(self._permit()))
            running: list[asyncio.Future[Any]] = [earlier, spare]
            try:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if earlier.done() or spare.exception() is not None:
                    await earlier
                    await finish([spare])
                    await permits.aclose()
                later = asyncio.ensure_future(self._observed(f"{kind}, end", second, 0.0))
                running.append(later)
                await asyncio.gather(earlier, later)
                return earlier.result(), later.result()
            finally:
                await finish(running)

    async def persist(
        self, what: str, attempt: Callable[[], Awaitable[T]], repair: Callable[[bool], Awaitable[None]]
    ) -> T:
        """Retry until success; raise if that is hopeless, or the budget is used up.

        What is lost time and again, although it was rebuilt, is an InfrastructureError too.

        Args:
            what: description of the attempt, for messages.
            attempt: makes the calls.
            repair: prepares the next attempt; called with True if the session or a client is lost.
        """
        failed_at_s, failures, losses = 0.0, 0, 0
        while True:
            try:
                return await attempt()
            except FAULTS as error:
                fault = classify(error)
                if fault is Fault.REFUSED:
                    raise ConfigError(
                        f"{what}: the API refuses the key ({describe(error)}); "
                        "check the environment's TINKER_API_KEY"
                    ) from error
                if fault is Fault.OLD:
                    raise ConfigError(
                        "[model].base_url: the server is too old for this version of the SDK "
                        f"({describe(error)}); update the server, or install the version of tinker that it "
                        "was made for"
                    ) from error
                if fault is Fault.WRONG:
                    raise RunFailedError(
                        f"{what}: the API rejects the request ({describe(error)})"
                    ) from error
                failures += 1
                if fault is Fault.LOST:
                    losses += 1
                failed_at_s = failed_at_s or self._unpaused_s()
                spent_s = self._unpaused_s() - failed_at_s
                if spent_s >= self.options.retry_budget_s or losses > MOST_LOSSES:
                    raise InfrastructureError(
                        f"{what}: failed {failures} times in {spent_s:.0f} s, most recently with "
                        f"{describe(error)}; a retry of the run continues from its last checkpoint"
                    ) from error
                pause_s = backoff_s(failures, self.options.first_retry_s, LONGEST_RETRY_S)
                log.warning("%s failed (%s); retrying in %.1f s", what, describe(error), pause_s)
            await asyncio.sleep(pause_s)
            await repair(fault in (Fault.LOST, Fault.BROKEN))

    @asynccontextmanager
    async def _one_permit(self) -> AsyncIterator[None]:
        longest_s, ended = self.options.permit_timeout_s, asyncio.Event()
        self.in_flight.add(ended)
        try:
            async with AsyncExitStack() as permits:
                try:
                    async with asyncio.timeout(longest_s):
                        await permits.enter_async_context(self._permit())
                except TimeoutError as error:
                    raise InfrastructureError(
                        f"no permit for an API call in {longest_s:g} s; "
                        "`retrain status` shows which workers hold permits, and for how long"
                    ) from error
                yield
        finally:
            self.in_flight.discard(ended)
            ended.set()

    async def _observed(self, kind: str, operation: Callable[[], Awaitable[T]], waited_s: float) -> T:
        """Run an operation with the timeout, and report its outcome.

        A refusal was reported when the API sent it. How long a refused or paused call took says nothing.
        """
        with self.outages.call(kind) as call:
            try:
                result = await self._in_time(operation)
                if kind.startswith(UPDATE) and self._times_again():
                    raise ResentError(
                        f"a request was sent {call.sent} times, and may have been done each time"
                    )
            except FAULTS as error:
                if isinstance(error, TimeoutError) or (
                    status_of(error) in OVERLOAD and not call.is_disturbed
                ):
                    self.outages.report(call.facts(overloaded=True))
                raise
            if not call.is_disturbed:
                self.outages.report(call.facts(waited=waited_s > WAITED_S))
            return result

    async def _in_time(self, operation: Callable[[], Awaitable[T]]) -> T:
        call = asyncio.ensure_future(operation())
        give_up_s = self._unpaused_s() + self.options.call_timeout_s
        try:
            while not call.done():
                left_s = give_up_s - self._unpaused_s()
                if left_s <= 0:
                    raise TimeoutError
                await asyncio.wait([call], timeout=max(left_s, SHORTEST_WAIT_S))
            return call.result()
        finally:
            await finish([call])

    def _unpaused_s(self) -> float:
        """Return a time that stands still while the API has paused all calls."""
        return time.monotonic() - self.outages.paused_s()


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """Return a pause that doubles, with jitter, so that workers do not try again in lockstep."""
    return min(longest_s, first_s * 2.0 ** min(failures - 1, 30)) * random.uniform(0.5, 1.0)


async def finish(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the futures that are still running and wait until they have ended."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


class Fault(Enum):
    """Six kinds of failure."""

    BUSY = auto()  # overload, timeout, connection, no room: the same call may succeed later
    LOST = auto()  # the session, model or sampler is gone: rebuild, then retry
    BROKEN = auto()  # for an unknown reason: as if it were lost
    WRONG = auto()  # the API rejects the request: a retry would not help
    REFUSED = auto()  # the API rejects the key
    OLD = auto()  # the API answers in a form that the SDK does not read


def classify(error: Exception) -> Fault:
    """Return the kind of an error: what it says of the server counts more than its status."""
    status, text = status_of(error), str(error)
    if status in (401, 403):
        return Fault.REFUSED
    if _OLD.search(text):
        return Fault.OLD
    # 402, payment required: the SDK has waited; the bill may be paid before the run is retried
    if _FULL.search(text) or status in (402, 408, *OVERLOAD):
        return Fault.BUSY
    if _LOST.search(text) or status in (404, 409, 410):
        return Fault.LOST
    if status is not None:
        return Fault.BUSY if status >= 500 else Fault.WRONG
    if isinstance(error, RequestFailedError):
        return Fault.WRONG if error.category is RequestErrorCategory.User else Fault.BROKEN
    if isinstance(error, TinkerError) and "api_key" in text:
        return Fault.REFUSED
    if isinstance(error, OSError | httpx.HTTPError | APIConnectionError):
        return Fault.BUSY
    return Fault.OLD if isinstance(error, AssertionError) else Fault.BROKEN


@contextmanager
def status_told() -> Iterator[None]:
    """Raise what the API answered where the SDK, not connected yet, fails at noting that it is unpaid."""
    try:
        yield
    except AttributeError as error:
        if isinstance(error.__context__, APIStatusError):
            raise error.__context__ from None
        raise


def is_taken(error: Exception) -> bool:
    """Whether the API has a state of the name already."""
    return isinstance(error, NameTakenError) or _TAKEN.search(str(error)) is not None


def saves() -> bool:
    """Whether the call in progress here saves a state."""
    call = _call()
    return call is not None and call.kind == SAVE


def is_full(error: Exception) -> bool:
    """Whether the API has no room for another model."""
    return _FULL.search(str(error)) is not None


def has_lost_model(error: Exception) -> bool:
    """Whether the API says that it has lost the session, or a model or sampler of it."""
    return status_of(error) in (409, 410) or _LOST.search(str(error)) is not None


def is_too_long(error: Exception) -> bool:
    """Whether the API rejects a prompt because it has no room in the model's context."""
    return _TOO_LONG.search(str(error)) is not None


def is_refusal(error: Exception) -> bool:
    """Whether the API refuses what a model is to be made of, and not because its session is lost."""
    about_session = status_of(error) in (409, 410) or _LOST_SESSION.search(str(error)) is not None
    return classify(error) is Fault.WRONG or (classify(error) is Fault.LOST and not about_session)


def lacks_route(error: Exception) -> bool:
    """Whether the server does not know a kind of request, rather than what is asked for."""
    return status_of(error) in (405, 422, 501) or _NO_ROUTE.search(str(error)) is not None


def describe(error: Exception) -> str:
    """Return an error as one line; the class name if it has no text."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def status_of(error: Exception) -> int | None:
    """Return the HTTP status that an error tells; None if it tells none."""
    if isinstance(error, APIStatusError):
        return int(error.status_code)
    match = _STATUS.search(str(error)) if isinstance(error, ValueError) else None
    return int(match[1]) if match else None


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
    sent: int = 0  # times that a request was sent which the server did not refuse
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

    @contextmanager
    def call(self, kind: str) -> Iterator[ApiCall]:
        """Attribute the requests that are made within to a call."""
        call = ApiCall(kind)
        before = CALL.set(call)
        try:
            yield call
        finally:
            CALL.reset(before)
            call.is_over = True

    def sending(self, path: str) -> None:
        """Note a request of the present call that does something, rather than ask for a result."""
        if path.endswith(SUBMITS) and (call := _call()):
            call.sent += 1

    def answered(self, path: str, status: int) -> None:
        """Note the answer to a request."""
        if path.endswith(SUBMITS) and status in REFUSALS and (call := _call()):
            call.sent -= 1
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

    @contextmanager
    def request(self, *, is_poll: bool) -> Iterator[None]:
        """Watch a request of the SDK; `is_poll` if it is for the result of a call."""
        began_s, task = time.monotonic(), None
        with suppress(RuntimeError):  # outside of an event loop
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
        shown = None
        if self._failure and self._down.since_s is not None:
            shown = OutageProgress("API down", self._failure, self._down.since_s)
        elif pause and self._paused.since_s is not None:
            shown = OutageProgress("API paused", pause, self._paused.since_s)
        if shown != self._shown:
            self._shown = shown
            self._observe(shown or OutageProgress())


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
