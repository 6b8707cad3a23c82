"""Holds the campaign's permits during one run's calls, without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from retrain.errors import InfrastructureError

A = TypeVar("A")
B = TypeVar("B")


class Permits:
    """Permits for one run's calls."""

    def __init__(self, permit: Callable[[], AbstractAsyncContextManager[object]], timeout_s: float) -> None:
        """Wrap a permit source.

        Args:
            permit: context manager that holds a permit while entered; safe to cancel.
            timeout_s: longest wait for a permit.
        """
        self._permit = permit
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Hold a permit while entered.

        Raises:
            InfrastructureError: no permit within the timeout.
        """
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await held.enter_async_context(self._permit())
            except TimeoutError as error:
                raise InfrastructureError(
                    f"no permit for an API call in {self._timeout_s:g} s; "
                    "`retrain status` shows which workers hold permits, and whether one is stopped"
                ) from error
            yield

    async def two_in_order(
        self, first: Callable[[], Awaitable[A]], second: Callable[[], Awaitable[B]]
    ) -> tuple[A, B]:
        """Run two calls that the API processes in order, concurrently if a second permit is free.

        The second is submitted when the first is done or another permit is acquired, whichever is
        earlier. The first call never waits for the second permit, so runs cannot deadlock.
        """
        async with self.one(), AsyncExitStack() as held:
            one = asyncio.ensure_future(first())
            spare = asyncio.ensure_future(held.enter_async_context(self._permit()))
            running: list[asyncio.Future[Any]] = [one, spare]
            try:
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                if one.done() or spare.exception() is not None:
                    await one
                    await _finish([spare])
                    await held.aclose()
                two = asyncio.ensure_future(second())
                running.append(two)
                await asyncio.gather(one, two)
                return one.result(), two.result()
            finally:
                await _finish(running)


async def _finish(futures: list[asyncio.Future[Any]]) -> None:
    """Cancel the futures that are still running and wait until they have ended."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)
