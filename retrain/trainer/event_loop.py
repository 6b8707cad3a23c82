"""Runs coroutine methods of plugins for synchronous callers."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

from retrain.backends import MaybeAwaitable

if TYPE_CHECKING:
    import asyncio  # takes 20 ms to import, which a synchronous backend does not need

T = TypeVar("T")

LEAVE_S = 5.0  # for tasks that still run at the end to clean up; then the thread is abandoned


class EventLoopThread:
    """An event loop in its own thread, started at the first coroutine and shared by all callers."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def wait_for(self, result: MaybeAwaitable[T]) -> T:
        """Return the result, after waiting for it if it is awaitable; callable from any thread."""
        if not inspect.isawaitable(result):
            return result
        coroutine = cast(
            "Coroutine[Any, Any, T]", result if inspect.iscoroutine(result) else _wait_for(result)
        )
        import asyncio

        future = asyncio.run_coroutine_threadsafe(coroutine, self._running_loop())
        try:
            return future.result()
        finally:
            future.cancel()  # has no effect unless the wait was interrupted

    def close(self) -> None:
        """Cancel running tasks and end the loop and its thread; safe to call twice."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(LEAVE_S)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        import asyncio

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name="backend-loop", daemon=True
                )
                self._thread.start()
            return self._loop


async def _wait_for(awaitable: Any) -> Any:
    return await awaitable


def _run(loop: asyncio.AbstractEventLoop) -> None:
    import asyncio

    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # cancels tasks and closes the loop at the end
        while not _ran_until_stopped(runner.get_loop()):
            pass


def _ran_until_stopped(loop: asyncio.AbstractEventLoop) -> bool:
    """Run the loop; False if a task raised an exit request, which its waiter receives."""
    try:
        loop.run_forever()
    except (SystemExit, KeyboardInterrupt):
        return False
    return True
