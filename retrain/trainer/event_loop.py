"""Lets the loop call plain and coroutine methods alike."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

from retrain.backends import MaybeAwaitable

if TYPE_CHECKING:
    import asyncio  # 20 ms that a plain backend does not need

T = TypeVar("T")

LEAVE_S = 5.0  # what still runs at the end may take so long to clean up; then it is left behind


class EventLoopThread:
    """An event loop in a thread of its own, started when first needed, shared by all callers of a run."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def wait_for(self, result: MaybeAwaitable[T]) -> T:
        """Return a method's result, waiting for it if it is awaitable. Callable from any thread."""
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
            future.cancel()  # of no effect on what is done; the wait was interrupted otherwise

    def close(self) -> None:
        """Cancel what still runs, and end the loop and its thread; safe to call twice."""
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

    with asyncio.Runner(loop_factory=lambda: loop) as runner:  # at its end: cancels tasks, closes the loop
        while not _ran_until_stopped(runner.get_loop()):
            pass


def _ran_until_stopped(loop: asyncio.AbstractEventLoop) -> bool:
    """Run; False if a task wants the process to end, which is for whoever waits for the task to hear."""
    try:
        loop.run_forever()
    except (SystemExit, KeyboardInterrupt):
        return False
    return True
