"""Answers what episodes ask for, with one call of the sampler after another, or with several at a time.

A server samples a call's turns beside those of others: no episode then waits for the longest turn of a call
that it is no part of. What is asked for while all calls are busy is sampled together in the next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextvars import copy_context
from itertools import count
from typing import TypeAlias

from retrain.backends import EpisodeProgress
from retrain.rollouts import NextTurn
from retrain.trainer.desk import Asked, Desk, Request, Taken

Sample: TypeAlias = Callable[[Sequence[Asked], int], Sequence[Taken]]  # with the number of the call


class TurnCalls:
    """The calls for the episodes of one play."""

    def __init__(
        self, desk: Desk, sample: Sample, episodes: int, observe: Callable[[EpisodeProgress], None]
    ) -> None:
        self._desk, self._sample, self._episodes, self._observe = desk, sample, episodes, observe
        self._lock = threading.Lock()  # guards what follows
        self._began_s = self._idle_since_s = time.monotonic()
        self._running = 0  # calls
        self._finished = self._turns = self._tokens = 0
        self._failure: BaseException | None = None
        self.idle_s = 0.0  # no turn was sampled: every episode waited for its environment

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
        with self._lock:
            self._begin()
        if self._failure is not None:
            raise self._failure

    def episode_ended(self) -> None:
        """Count an episode that is over."""
        with self._lock:
            self._finished += 1
        self._show()

    def _call(self, requests: Sequence[Request], number: int, free: threading.Semaphore) -> None:
        with self._lock:
            self._begin()
        try:
            taken = self._sample([request.asked for request in requests], number)
            self._count(requests, taken)
            self._desk.answer(requests, taken)
        except BaseException as error:  # noqa: BLE001 - raised by `serve`
            self._failure = self._failure or error
            self._desk.close()
        finally:
            with self._lock:
                self._running -= 1
                self._idle_since_s = time.monotonic()
            free.release()
        self._show()

    def _begin(self) -> None:
        if self._running == 0:
            self.idle_s += time.monotonic() - self._idle_since_s
        self._running += 1

    def _count(self, requests: Sequence[Request], taken: Sequence[Taken]) -> None:
        before = (len(one.asked.rollout.tokens) if isinstance(one.asked, NextTurn) else 0 for one in requests)
        lengths = [len(getattr(one, "tokens", ())) for one in taken]
        with self._lock:
            self._turns += sum(map(bool, lengths))
            self._tokens += sum(max(0, after - own) for after, own in zip(lengths, before, strict=True))

    def _show(self) -> None:
        took_s = time.monotonic() - self._began_s
        self._observe(EpisodeProgress(self._episodes, self._finished, self._turns, self._tokens, took_s))
