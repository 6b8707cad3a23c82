"""Answers what episodes ask for, with one call of the sampler after another, or with several at a time.

A server samples a call's turns beside those of others: no episode then waits for the longest turn of a call
that it is no part of. What is asked for while all calls are busy is sampled together in the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from itertools import count
from typing import TypeAlias

from retrain.backends.live_turns import Taken
from retrain.trainer.desk import Asked, Desk, Request
from retrain.trainer.play_meter import PlayMeter

Sample: TypeAlias = Callable[[Sequence[Asked], int], Sequence[Taken]]  # with the number of the call


class TurnCalls:
    """The calls for the episodes of one play."""

    def __init__(self, desk: Desk, sample: Sample, meter: PlayMeter) -> None:
        self._desk, self._sample, self._meter = desk, sample, meter
        self._failure: BaseException | None = None

    def serve(self, at_once: int) -> None:
        """Answer until the desk is closed; raise an error of the sampler."""
        numbers, free = count(), threading.Semaphore(at_once)
        with ExitStack() as opened:
            threads = opened.enter_context(ThreadPoolExecutor(at_once)) if at_once > 1 else None
            while free.acquire() and (requests := self._desk.next_batch()):
                if threads is None:
                    self._call(requests, next(numbers), free)
                else:
                    # its cost is counted where the caller's is
                    threads.submit(copy_context().run, self._call, requests, next(numbers), free)
        if self._failure is not None:
            raise self._failure

    def _call(self, requests: Sequence[Request], number: int, free: threading.Semaphore) -> None:
        self._meter.begin()
        try:
            taken = self._sample([request.asked for request in requests], number)
            self._meter.count(requests, taken)
            self._desk.answer(requests, taken)
        except BaseException as error:  # noqa: BLE001 - raised by `serve`
            self._failure = self._failure or error
            self._desk.close()
        finally:
            self._meter.end()
            free.release()
        self._meter.show()
