"""Samples turns with a backend's calls: those that begin a conversation, and those that continue one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeAlias, TypeVar

import numpy as np

from retrain.backends import Sampling
from retrain.backends.live_turns import Taken
from retrain.errors import PromptError
from retrain.event_loop import EventLoopThread
from retrain.rollouts import FirstTurn, NextTurn, Prompt
from retrain.trainer.desk import Asked

T = TypeVar("T")
SampleTurns: TypeAlias = Callable[[Sequence[Asked], Sampling], Sequence[Taken]]


@dataclass(frozen=True)
class TurnSampler:
    """Samples turns with a backend."""

    backend: Any  # `extend` is optional in the protocol
    calls: EventLoopThread
    max_turn_tokens: int  # 0: `max_tokens` alone is the limit

    def __call__(self, asked: Sequence[Asked], how: Sampling) -> list[Taken]:
        """Sample the first turns, then the others; an error in place of one that cannot be read."""
        limit = min(how.max_tokens, self.max_turn_tokens or how.max_tokens)
        first = [FirstTurn(one, limit) if isinstance(one, Prompt) else one for one in asked]
        begun = [one for one in first if isinstance(one, FirstTurn)]
        further = [one for one in first if isinstance(one, NextTurn)]

        part = count()

        def begin(some: Sequence[FirstTurn]) -> list[Taken]:
            """Sample with one call for each limit."""
            taken: dict[int, Taken] = {}
            for most in sorted({one.max_tokens for one in some}):
                alike = [number for number, one in enumerate(some) if one.max_tokens == most]
                own = replace(of_its_own(how, next(part)), max_tokens=most)
                groups = self.calls.wait_for(self.backend.sample([some[n].prompt for n in alike], own))
                taken |= zip(alike, (group.rollouts[0] for group in groups), strict=True)
            return [taken[number] for number in range(len(some))]

        def extend(some: Sequence[NextTurn]) -> list[Taken]:
            return list(self.calls.wait_for(self.backend.extend(some, of_its_own(how, next(part)))))

        opening, extended = iter(_readable(begun, begin)), iter(_readable(further, extend))
        return [next(extended if isinstance(one, NextTurn) else opening) for one in asked]


def of_its_own(how: Sampling, part: int) -> Sampling:
    """Return how to sample a part: with random numbers of its own, where a seed determines them."""
    if how.seed is None:
        return how
    return replace(how, seed=int(np.random.SeedSequence([how.seed, part]).generate_state(1)[0]))


def _readable(asked: Sequence[T], sample: Callable[[Sequence[T]], list[Taken]]) -> list[Taken]:
    """Sample what the model can read; halves are tried until an unreadable one is alone."""
    if not asked:
        return []
    try:
        return sample(asked)
    except PromptError as error:
        if len(asked) == 1:
            return [error]
    half = len(asked) // 2
    return [*_readable(asked[:half], sample), *_readable(asked[half:], sample)]
