"""Blocking functions awaited by an event loop that goes on meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(
    function: Callable[[], T], unwanted: Callable[[T], object] = lambda _: None
) -> asyncio.Future[T]:
    """Run a blocking function in a daemon thread of its own.

    Neither a full thread pool nor the interpreter's end waits for it.

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
            if future.cancelled() or not _call(loop, deliver, result):
                unwanted(result)  # here, since the event loop may be busy

    threading.Thread(target=work, name="blocking-call", daemon=True).start()
    return future


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> bool:
    """Call in the loop's thread; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        return False
    return True
