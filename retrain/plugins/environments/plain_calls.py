"""Threads that call the plain functions of environments: of all episodes in turn, or of one alone.

In turn, slow functions do not hold up the others. All that are asked for before the event loop looks for
events are passed on together, so that a call costs microseconds and the order in which calls begin does not
depend on how long they take. A call that takes longer than `SLOW_S` keeps its thread, and those after it get
another one.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from retrain.base.event_loop import LeftBehindError, end_runaway

SLOW_S = 0.05
SLOW_ONCE_S = 0.001  # the same after a slow call, because the next ones probably are


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    function: Callable[[], Any]  # raises nothing
    unwanted: Callable[[Any], object]  # takes a result that nobody waits for
    answer: asyncio.Future[Any]

    def deliver(self, result: Any) -> None:
        if self.answer.done():
            self.unwanted(result)
        else:
            self.answer.set_result(result)


@dataclass(slots=True, eq=False)
class _Batch:
    """Calls that a thread works through."""

    calls: Sequence[_Call]
    loop: asyncio.AbstractEventLoop
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards the others
    results: list[Any] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)  # of the call that runs
    thread: threading.Thread | None = None  # that works
    is_left: bool = False  # with the call that runs, because it is slow

    def work(self) -> bool:
        """Make the calls; False if this thread was left with one of them."""
        self.thread = threading.current_thread()
        for call in self.calls:
            result = call.function()
            with self.lock:
                if not self.is_left:
                    self.results.append(result)
                    self.began_s = time.monotonic()
                    continue
            try:
                self.loop.call_soon_threadsafe(call.deliver, result)
            except RuntimeError:  # it is closed
                call.unwanted(result)
            return False
        return True


Batches: TypeAlias = "queue.SimpleQueue[tuple[_Batch, Callable[[_Batch], None]] | None]"


class InTurn:
    """The functions of all episodes of a run, or of one; used within one event loop."""

    def __init__(self, limit_s: float, *, is_own: bool = False) -> None:
        """Prepare.

        Args:
            limit_s: the time that a call may take.
            is_own: the thread is that of one episode, which what it opens may belong to: only a call that
                takes too long keeps it from those that follow.
        """
        self._limit_s = limit_s
        slow = (limit_s, limit_s) if is_own else (SLOW_S, SLOW_ONCE_S)
        self._usually_slow_s, self._slow_once_s = (min(one, limit_s) for one in slow)
        self._slow_s = self._usually_slow_s
        self._waiting: list[_Call] = []
        self._running: _Batch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._batches: Batches | None = None

    async def call(self, function: Callable[[], Any], unwanted: Callable[[Any], object]) -> Any:
        """Return what a function returns, which raises nothing; LeftBehindError if it takes too long."""
        loop = asyncio.get_running_loop()
        call = _Call(function, unwanted, loop.create_future())
        self._waiting.append(call)
        if len(self._waiting) == 1:
            loop.call_soon(self._pass_on)
        return await call.answer

    def close(self) -> None:
        """End the thread after its call; a further call begins another one."""
        if self._batches is not None:
            self._batches.put(None)
            self._batches = None

    def _pass_on(self) -> None:
        if self._running is not None or not self._waiting:
            return
        if self._batches is None:
            self._batches = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._batches,), name="environment", daemon=True).start()
        loop = asyncio.get_running_loop()
        self._running, self._waiting = _Batch(self._waiting, loop), []
        self._batches.put((self._running, self._finish))
        self._timer = loop.call_later(self._slow_s, self._check_progress, self._running)

    def _finish(self, batch: _Batch) -> None:
        if batch is self._running:
            self._running = None
            self._slow_s = self._usually_slow_s
            if self._timer is not None:
                self._timer.cancel()
            self._deliver(batch)
            self._pass_on()

    def _deliver(self, batch: _Batch) -> None:
        for call, result in zip(batch.calls, batch.results, strict=False):  # those that were made
            call.deliver(result)

    def _check_progress(self, batch: _Batch) -> None:
        """Leave the thread alone with a call that is slow; the calls after it go to another."""
        if batch is not self._running:
            return
        loop = asyncio.get_running_loop()
        with batch.lock:
            took_s = time.monotonic() - batch.began_s
            done = len(batch.results)
            batch.is_left = took_s >= self._slow_s and done < len(batch.calls)
        if not batch.is_left:
            self._timer = loop.call_later(
                max(self._slow_s - took_s, SLOW_ONCE_S), self._check_progress, batch
            )
            return

        def give_up() -> None:
            answer = batch.calls[done].answer
            if not answer.done():
                answer.set_exception(LeftBehindError())
                if batch.thread is not None:
                    end_runaway(batch.thread, "a function of the environment")

        loop.call_later(self._limit_s - took_s, give_up)
        self._slow_s = self._slow_once_s
        self._running, self._batches = None, None
        self._deliver(batch)
        self._waiting = [*batch.calls[done + 1 :], *self._waiting]
        self._pass_on()


def _work(batches: Batches) -> None:
    while (given := batches.get()) is not None:
        batch, finish = given
        if not batch.work():
            return
        try:
            batch.loop.call_soon_threadsafe(finish, batch)
        except RuntimeError:  # the loop is closed
            for call, result in zip(batch.calls, batch.results, strict=True):
                call.unwanted(result)
            return
