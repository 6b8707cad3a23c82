"""Takes the campaign's permits, which block a thread, without blocking the event loop.

Every wait has a daemon thread of its own, so that neither a full thread pool nor the interpreter's
end waits for a permit. A permit that arrives for somebody who left is given back at once, by that
thread: the event loop may be busy then, or closed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeVar

from retrain.errors import InfrastructureError

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")

Permit = AbstractContextManager[object]


class Permits:
    """Permits for one run's calls."""

    def __init__(self, permit: Callable[[], Permit], timeout_s: float) -> None:
        """Wrap a permit source.

        Args:
            permit: gives a context manager whose entry may block; entered and left in different threads.
            timeout_s: longest wait for one.
        """
        self._permit = permit
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Hold a permit.

        Raises:
            InfrastructureError: none came in time.
        """
        asked = _Asked(self._permit)
        try:
            await self._arrival(asked)
            yield
        finally:
            asked.give_back()

    async def two_in_order(
        self, first: Callable[[], Awaitable[A]], second: Callable[[], Awaitable[B]]
    ) -> tuple[A, B]:
        """Run two calls whose order the API keeps, at the same time if a second permit is there.

        The second is submitted when the first is done or another permit comes, whichever is
        earlier: nobody sits on a permit while waiting for one, so that runs cannot block each other.
        """
        async with self.one():
            one = asyncio.ensure_future(first())
            spare = _Asked(self._permit)
            running: list[asyncio.Future[Any]] = [one]
            waiting: list[asyncio.Future[Any]] = [one, spare.came]
            try:
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if one.done() or spare.came.exception() is not None:
                    await one
                    spare.give_back()
                two = asyncio.ensure_future(second())
                running.append(two)
                await asyncio.gather(one, two)
                return one.result(), two.result()
            finally:
                await _finish(running)
                spare.give_back()

    async def _arrival(self, asked: _Asked) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await asked.came
        except TimeoutError as error:
            raise InfrastructureError(
                f"no permit for an API call in {self._timeout_s:g} s; "
                "`retrain status` shows who holds them, one may be stopped"
            ) from error


class _Asked:
    """A permit that was asked for; it can be given back before it comes, while it comes and after."""

    def __init__(self, permit: Callable[[], Permit]) -> None:
        self._permit = permit
        self._lock = threading.Lock()
        self._held: Permit | None = None
        self._is_unwanted = False
        self.came: asyncio.Future[None] = in_thread(self._enter)

    def give_back(self) -> None:
        """Return the permit, now or when it comes."""
        if not self.came.cancel() and not self.came.cancelled():
            self.came.exception()  # whoever waited has heard of it, or nobody needs to
        with self._lock:
            self._is_unwanted = True
            held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)

    def _enter(self) -> None:
        permit = self._permit()
        permit.__enter__()
        with self._lock:
            if not self._is_unwanted:
                self._held = permit
                return
        permit.__exit__(None, None, None)


def in_thread(
    function: Callable[[], T], unwanted: Callable[[T], object] = lambda _: None
) -> asyncio.Future[T]:
    """Run a blocking function in a daemon thread.

    Args:
        function: what to run.
        unwanted: takes the result if nobody waits for it any more.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T) -> None:
        if future.done():
            unwanted(result)
        else:
            future.set_result(result)

    def fail(error: Exception) -> None:
        if not future.done():
            future.set_exception(error)

    def work() -> None:
        try:
            result = function()
        except Exception as error:  # noqa: BLE001 - carried to whoever waits
            _call(loop, fail, error)
        else:
            if not _call(loop, deliver, result):
                unwanted(result)

    threading.Thread(target=work, name="blocking-call", daemon=True).start()
    return future


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> bool:
    """Call in the loop's thread; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        return False
    return True


async def _finish(futures: list[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait until it has ended."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
