"""API calls: each holds one of the campaign's permits, has a timeout, and is metered and retried."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from tinker.lib.retry_handler import RetryConfig

from retrain.backends import BackendSpec
from retrain.backends.metering import NOTHING
from retrain.backends.tinker import TinkerOptions
from retrain.backends.tinker.faults import FAULTS, Fault, classify, describe, is_overload, is_refused_unbilled
from retrain.backends.tinker.outages import Outages
from retrain.base.errors import ConfigError, InfrastructureError, RunFailedError
from retrain.control.rules.concurrency_limit import WAITED_S
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


class ApiCalls:
    """One run's API calls, without blocking the event loop."""

    def __init__(self, spec: BackendSpec, options: TinkerOptions) -> None:
        self._meter, self._permit = spec.meter, spec.permit
        self.outages = Outages(spec.observe, spec.observe_call)
        self.options = options
        self._in_flight: set[asyncio.Event] = set()  # set at the end of a call

    def in_flight(self) -> frozenset[asyncio.Event]:
        """Return the ends of all calls that hold or wait for a permit."""
        return frozenset(self._in_flight)

    async def once(self, kind: str, operation: Callable[[], Awaitable[T]]) -> T:
        """Make one call under a permit; a TimeoutError if its result takes too long."""
        asked_s = time.monotonic()
        async with self._one_permit():
            return await self._observed(kind, operation, time.monotonic() - asked_s)

    async def billed(
        self, at_most: Tokens, call: Callable[[], Awaitable[T]], count: Callable[[T], Tokens] | None = None
    ) -> T:
        """Make a call and `count` what it was billed, by default all of it; nothing if the API refused it."""
        with self._meter.call(at_most) as made:
            try:
                result = await call()
            except FAULTS as error:
                made.billed = NOTHING if is_refused_unbilled(error) else None
                raise
            made.billed = count(result) if count else at_most
        return result

    async def pair(
        self, kind: str, first: Callable[[], Awaitable[A]], second: Callable[[], Awaitable[B]]
    ) -> tuple[A, B]:
        """Make two calls that the API processes in order, concurrently if a second permit is free.

        The second is submitted when the first is done or another permit is acquired, whichever is
        earlier. The first call never waits for the second permit, so runs cannot deadlock.
        """
        async with self._one_permit(), AsyncExitStack() as held:
            earlier = asyncio.ensure_future(self._observed(kind, first, 0.0))
            spare = asyncio.ensure_future(held.enter_async_context(self._permit()))
            running: list[asyncio.Future[Any]] = [earlier, spare]
            try:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if earlier.done() or spare.exception() is not None:
                    await earlier
                    await finish([spare])
                    await held.aclose()
                later = asyncio.ensure_future(self._observed(f"{kind}, end", second, 0.0))
                running.append(later)
                await asyncio.gather(earlier, later)
                return earlier.result(), later.result()
            finally:
                await finish(running)

    async def persist(
        self,
        what: str,
        attempt: Callable[[], Awaitable[T]],
        repair: Callable[[bool], Awaitable[None]],
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
                _raise_if_final(what, error, fault)
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
        self._in_flight.add(ended)
        try:
            async with AsyncExitStack() as held:
                try:
                    async with asyncio.timeout(longest_s):
                        await held.enter_async_context(self._permit())
                except TimeoutError as error:
                    raise InfrastructureError(
                        f"no permit for an API call in {longest_s:g} s; "
                        "`retrain status` shows which workers hold permits, and for how long"
                    ) from error
                yield
        finally:
            self._in_flight.discard(ended)
            ended.set()

    async def _observed(self, kind: str, operation: Callable[[], Awaitable[T]], waited_s: float) -> T:
        """Run an operation with the timeout, and report its outcome.

        A refusal was reported when the API sent it. How long a refused or paused call took says nothing.
        """
        with self.outages.call(kind) as call:
            try:
                result = await self._in_time(operation)
            except FAULTS as error:
                if isinstance(error, TimeoutError) or (is_overload(error) and not call.is_disturbed):
                    self.outages.report(call.facts(overloaded=True))
                raise
            if not call.is_disturbed:
                self.outages.report(call.facts(waited=waited_s > WAITED_S))
            return result

    async def _in_time(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Run an operation with the timeout."""
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


def _raise_if_final(what: str, error: Exception, fault: Fault) -> None:
    if fault is Fault.REFUSED:
        raise ConfigError(
            f"{what}: the API refuses the key ({describe(error)}); check the environment's TINKER_API_KEY"
        ) from error
    if fault is Fault.OLD:
        raise ConfigError(
            f"[model].base_url: the server is too old for this version of the SDK ({describe(error)}); "
            "update the server, or install the version of tinker that it was made for"
        ) from error
    if fault is Fault.WRONG:
        raise RunFailedError(f"{what}: the API rejects the request ({describe(error)})") from error


async def finish(futures: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel the futures that are still running and wait until they have ended."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
