"""Event loops and code that blocks: a loop for callers without one, a thread for calls within one."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    import asyncio  # takes 20 ms to import, which synchronous code does not need
    from concurrent.futures import Future

T = TypeVar("T")

LEAVE_S = 5.0  # for tasks that still run at the end to clean up; then the thread is abandoned


class LeftBehindError(Exception):
    """A call took too long; its thread still runs."""


class EventLoopThread:
    """An event loop in its own thread, started at the first coroutine and shared by all callers."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
        """Prepare; `new_loop` makes the loop, by default one as asyncio does."""
        self._new_loop = new_loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @overload
    def wait_for(self, result: Coroutine[Any, Any, T]) -> T: ...
    @overload
    def wait_for(self, result: T | Awaitable[T]) -> T: ...
    def wait_for(self, result: Any) -> Any:
        """Return the result, after waiting for it if it is awaitable; callable from any thread."""
        if not inspect.isawaitable(result):
            return result
        future = self.begin(result)
        try:
            return future.result()
        finally:
            future.cancel()  # has no effect unless the wait was interrupted

    def begin(self, awaitable: Awaitable[T]) -> Future[T]:
        """Begin to await something in the loop; return its result to come."""
        import asyncio

        # a coroutine is begun itself, so that a cancellation before its first step ends it
        begun = awaitable if inspect.iscoroutine(awaitable) else _wait_for(awaitable)
        return asyncio.run_coroutine_threadsafe(begun, self._running_loop())

    def running_task(self) -> asyncio.Task[object] | None:
        """Return the task that the loop runs at this moment."""
        import asyncio

        return None if self._loop is None else asyncio.current_task(self._loop)

    def give_up(self, what: str) -> None:
        """End what computes in the loop, if anything does."""
        from retrain.base import (
            runaways,  # not at the top: few processes need it, and explain is to start fast
        )

        if self._thread is not None:
            runaways.give_up(self._thread, what)

    def close(self) -> None:
        """Cancel running tasks and end the loop and its thread; safe to call twice."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(LEAVE_S)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        import asyncio

        with asyncio.Runner(loop_factory=lambda: loop) as runner:  # cancels tasks and closes it at the end
            runner.get_loop()
            while self._loop is loop:  # a task may have stopped it
                with suppress(SystemExit, KeyboardInterrupt):  # a task's exit request is its waiter's
                    loop.run_forever()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        import asyncio

        with self._lock:
            if self._loop is None:
                self._loop = (self._new_loop or asyncio.new_event_loop)()
                self._thread = threading.Thread(
                    target=self._run, args=(self._loop,), name="backend-loop", daemon=True
                )
                self._thread.start()
            return self._loop


def result_of(value: T | Awaitable[T]) -> T:
    """Return a value, awaited in a loop of its own if it is awaitable."""
    if not inspect.isawaitable(value):
        return value
    import asyncio

    found: T = asyncio.run(_wait_for(value))
    return found


def result_within(limit_s: float, function: Callable[[], T | Awaitable[T]]) -> T:
    """Return what a function gives, called in a thread; LeftBehindError if it takes too long."""
    result = begun(lambda: result_of(function()))
    try:
        return result.result(limit_s)
    except TimeoutError as error:
        if result.done():  # in the last moment, or with a TimeoutError of its own
            return result.result()
        raise LeftBehindError from error


async def _wait_for(awaitable: Awaitable[T]) -> T:
    return await awaitable


def in_new_thread(work: Callable[[], None]) -> threading.Thread:
    """Begin to work in a daemon thread, which neither a thread pool nor the interpreter's end waits for."""
    thread = threading.Thread(target=work, name="blocking-call", daemon=True)
    thread.start()
    return thread


def begun(function: Callable[[], T]) -> Future[T]:
    """Call a function in a daemon thread; return its result to come, which cannot be cancelled."""
    return _begun(function)[0]


def _begun(function: Callable[[], T]) -> tuple[Future[T], threading.Thread]:
    from concurrent.futures import Future

    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            result.set_exception(error)

    return result, in_new_thread(work)


def in_thread(
    function: Callable[[], T], unwanted: Callable[[T], object] = lambda _: None, runaway: str = ""
) -> asyncio.Future[T]:
    """Run a blocking function in a thread; `unwanted` takes a result that nobody waits for.

    A function that is named by `runaway` is ended if it computes when nobody waits for it any more.
    """
    import asyncio

    (result, thread), once = _begun(function), threading.Lock()
    future = asyncio.wrap_future(result)

    def take_back(_: object) -> None:
        is_lost = future.cancelled() or future.get_loop().is_closed()
        if is_lost and result.done() and result.exception() is None and once.acquire(blocking=False):
            unwanted(result.result())
        if runaway and future.cancelled() and not result.done():
            from retrain.base import runaways

            runaways.give_up(thread, runaway)

    result.add_done_callback(take_back)  # in its thread, since the event loop may be busy
    future.add_done_callback(take_back)  # a wait that is cancelled after the function has ended
    return future
