"""Scores on all ranks of a run: each opens the reward too, and scores a part of the completions.

The reward must declare that it is pure: its scores are the same wherever they are computed. One that starts
programs uses all cores of its machine, so its completions are cut over machines, by their cores.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from retrain.backends import Backend
from retrain.base.errors import ConfigError, InfrastructureError
from retrain.base.event_loop import EventLoopThread
from retrain.plugins.rewards import Answer, BatchScorer, Score
from retrain.plugins.rewards.opening import open_reward

SENT_S = 0.02  # that other ranks must save: sending completions there and scores back takes milliseconds
TELL_EVERY_S = 1.0
_OPEN: dict[bytes, tuple[BatchScorer, EventLoopThread]] = {}  # a rank's rewards, by what opens them


class Opening(NamedTuple):
    """What opens a reward, on any rank."""

    name: str
    params: Mapping[str, Any]
    sandbox: Mapping[str, Any] | None


class RankScorer(BatchScorer):
    """Scores with a reward on all ranks."""

    def __init__(
        self,
        own: BatchScorer,
        calls: EventLoopThread,
        opening: Opening,
        backend: Backend,
        weights: Sequence[float],
    ) -> None:
        """Wrap rank 0's scorer; `weights` are the ranks' parts of the completions."""
        self.sandbox, self.uses_all_cores = own.sandbox, own.uses_all_cores
        self._own, self._calls, self._backend, self._weights = own, calls, backend, weights
        self._opening = pickle.dumps(opening)
        self._elsewhere = 0  # completions that others scored
        self._each_s = math.inf  # of a completion on rank 0

    @property
    def scored(self) -> int | None:
        own = self._own.scored
        return None if own is None else own + self._elsewhere

    def score_all(self, answers: Sequence[Answer]) -> list[Score]:
        """Score every completion, in order; on rank 0 alone if that takes less time than sending them.

        Raises:
            ConfigError: a rank runs programs in another sandbox.
        """
        if self._each_s * len(answers) < SENT_S:
            return self._score(answers)
        numbers = cut(len(answers), self._weights)
        own, *others = ([answers[number] for number in part] for part in numbers)
        calls = [partial(score_part, self._opening, part, self.sandbox) for part in others]
        scores = [*chain(*self._backend.call_ranks([lambda _: self._score(own), *calls], self._add))]
        if len(scores) != len(answers):
            return scores  # an error of the reward's author, as on one rank
        by_number = dict(zip(chain(*numbers), scores, strict=True))
        return [by_number[number] for number in range(len(answers))]

    def _score(self, answers: Sequence[Answer]) -> list[Score]:
        began_s = time.perf_counter()
        scores = self._calls.wait_for(self._own.score_all(answers))
        if answers:
            self._each_s = (time.perf_counter() - began_s) / len(answers)
        return scores

    def _add(self, count: int) -> None:
        self._elsewhere += count

    def close(self) -> None:
        """Close it on all ranks; after one has ended, on this one only."""
        others = [partial(close_part, self._opening) for _ in self._weights[1:]]
        try:
            with suppress(InfrastructureError):
                self._backend.call_ranks([lambda _: None, *others], self._add)
        finally:
            self._own.close()


def cut(count: int, weights: Sequence[float]) -> list[list[int]]:
    """Return the numbers of each rank's completions, in order; those of a group are on several ranks."""
    numbers: list[list[int]] = [[] for _ in weights]
    ranks = [rank for rank, weight in enumerate(weights) if weight > 0]
    for number in range(count):
        rank = min(ranks, key=lambda each: (len(numbers[each]) + 1) / weights[each])
        numbers[rank].append(number)
    return numbers


def score_part(
    opening: bytes, answers: Sequence[Answer], sandbox: str, tell: Callable[[int], object]
) -> list[Score]:
    """Score completions on a rank other than 0, and tell how many more are done."""
    if not answers:
        return []
    if opening not in _OPEN:
        _OPEN[opening] = open_reward(*pickle.loads(opening)), EventLoopThread()
    scorer, calls = _OPEN[opening]
    if scorer.sandbox != sandbox:
        raise ConfigError(
            f"[reward].sandbox: a rank runs programs in {scorer.sandbox!r}, and rank 0 in {sandbox!r}; "
            "name one that works on all nodes"
        )
    with _telling(scorer, tell):
        return [*calls.wait_for(scorer.score_all(answers))]


def close_part(opening: bytes, _: object) -> None:
    """Close the reward on a rank other than 0, if that has scored."""
    if opening in _OPEN:
        for part in _OPEN.pop(opening):
            part.close()


@contextmanager
def _telling(scorer: BatchScorer, tell: Callable[[int], object]) -> Iterator[None]:
    is_over = threading.Event()

    def tell_more(told: int) -> None:
        is_last = False
        while not is_last:
            is_last = is_over.wait(TELL_EVERY_S)
            tell((scored := scorer.scored or told) - told)
            told = scored

    thread = threading.Thread(target=tell_more, args=(scorer.scored or 0,))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
