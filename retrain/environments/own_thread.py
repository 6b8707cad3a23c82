"""Calls the plain functions of one episode in a thread of its own, which what they open may belong to."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from retrain.environments.in_turn import LeftBehindError
from retrain.event_loop import in_thread

Jobs: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"


class OwnThread:
    """A thread that begins with the first call, and is left with one that takes too long."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s` is the time that a call may take."""
        self._limit_s = limit_s
        self._jobs: Jobs | None = None

    async def call(self, function: Callable[[], Any], unwanted: Callable[[Any], object]) -> Any:
        """Return what a function returns, which raises nothing; LeftBehindError if it takes too long."""
        try:
            async with asyncio.timeout(self._limit_s):
                return await in_thread(function, unwanted, self._begin)
        except TimeoutError as error:
            self.end()
            raise LeftBehindError from error

    def end(self) -> None:
        """End the thread after its call; a further call begins another one."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    def _begin(self, job: Callable[[], None]) -> None:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs,), name="episode", daemon=True).start()
        self._jobs.put(job)


def _work(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
