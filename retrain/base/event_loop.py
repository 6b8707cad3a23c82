"""Event loops and code that blocks: a loop for callers without one, a thread for calls within one.

Threads may compute on after the call that they were for was given up. Nothing in Python ends a thread, and
one that computes holds the interpreter's lock for most of the time, which slows down every other thread. So
an exit is raised in it, which ends all but code that catches every exception or computes in C; where it does
not end, threads pass the lock on fifty times as often. A thread that waits is left alone. Time is the
processor's: on a busy machine, or as one of many, a thread that computes has little of it.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    import asyncio  # takes 20 ms to import, which synchronous code does not need
    from concurrent.futures import Future

T = TypeVar("T")
LEAVE_S = 5.0  # for tasks that still run at the end to clean up; then the thread is abandoned
POLL_S, EXITS = 0.2, 4  # between two checks of a thread; exits that are raised in it
COMPUTED_S = 0.1  # processor time of a thread that computes; one that polls each 10 ms takes 65 s for it
WATCHED_S = 10.0  # processor time of the process after which a thread that has not used so much waits
LONGEST_S = 60.0  # wall time after which it waits
THREAD_CLOCK = 0b110  # of Linux's clock ids: of a thread, by its number, in processor time
SWITCH_S = 1e-4  # that a thread keeps the interpreter's lock, from when one of them cannot be ended
RUNAWAYS: list[str] = []  # what each thread was for that computed on after it was given up


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
            future.cancel()  # has no effect unless this was interrupted

    def begin(self, awaitable: Awaitable[T]) -> Future[T]:
        """Begin to await something in the loop; return its result to come."""
        import asyncio

        # a coroutine is begun itself, so that a cancellation before its first step ends it
        begun = awaitable if inspect.iscoroutine(awaitable) else _wait_for(awaitable)
        with self._lock:
            if (loop := self._loop) is None:
                loop = self._loop = (self._new_loop or asyncio.new_event_loop)()
                self._thread = threading.Thread(
                    target=self._run, args=(loop,), name="backend-loop", daemon=True
                )
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(begun, loop)

    def running_task(self) -> asyncio.Task[object] | None:
        """Return the task that the loop runs at this moment."""
        import asyncio

        return None if self._loop is None else asyncio.current_task(self._loop)

    def give_up(self, what: str) -> None:
        """End what computes in the loop, if anything does."""
        if self._thread is not None:
            end_runaway(self._thread, what)

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


def result_of(value: T | Awaitable[T]) -> T:
    """Return a value, awaited in a loop of its own if it is awaitable."""
    if not inspect.isawaitable(value):
        return value
    import asyncio

    result: T = asyncio.run(_wait_for(value))
    return result


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

    # a daemon: neither a thread pool nor the interpreter's end waits for it
    thread = threading.Thread(target=work, name="blocking-call", daemon=True)
    thread.start()
    return result, thread


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
            end_runaway(thread, runaway)

    result.add_done_callback(take_back)  # in its thread, since the event loop may be busy
    future.add_done_callback(take_back)  # a wait that is cancelled after the function has ended
    return future


def end_runaway(thread: threading.Thread, what: str) -> None:
    """End a thread if it computes; one that waits, or ends, is left alone. Returns at once."""
    threading.Thread(target=_end, args=(thread, what), name="runaway", daemon=True).start()


def _end(thread: threading.Thread, what: str) -> None:
    import ctypes  # here: few processes need it, and many import this module

    if not _computes(thread):
        return
    RUNAWAYS.append(what)
    for _ in range(EXITS):
        number = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))
        if not _computes(thread):
            return
    sys.setswitchinterval(SWITCH_S)


def _computes(thread: threading.Thread) -> bool:
    """Watch a thread until it has computed, or the process has without it, or it has ended."""
    used_s = _processor_s(thread)
    last_s, last_used_s = time.monotonic() + LONGEST_S, time.process_time() + WATCHED_S
    while thread.is_alive() and time.monotonic() < last_s and time.process_time() < last_used_s:
        thread.join(POLL_S)
        if _processor_s(thread) - used_s > COMPUTED_S:
            return True
    return False


def _processor_s(thread: threading.Thread) -> float:
    """Return the processor time of a thread; 0 if it has ended, or the system does not tell."""
    if sys.platform != "linux" or not thread.is_alive() or thread.native_id is None:
        return 0.0
    try:
        # not by `pthread_getcpuclockid`, which crashes the process if the thread ends at this moment
        return time.clock_gettime(~thread.native_id << 3 | THREAD_CLOCK)
    except OSError:
        return 0.0
