"""The order of prompts: shuffled epochs, of which a position identifies a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

from retrain.control.rules import StateDict

T = TypeVar("T")


class PromptStream(Generic[T]):
    """Endless shuffled epochs over the training prompts (or other rows), for any batch sizes.

    The order of an epoch depends only on the seed and the epoch's number, so a position in the stream
    identifies a prompt. The state is the next position and the positions to take again.
    """

    def __init__(self, prompts: Sequence[T], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._taken = 0
        self._again: list[int] = []
        self._epoch, self._order = 0, self._shuffled(0)

    def take(self, count: int) -> list[T]:
        """Return the next prompts; batches may span epochs."""
        return [self.at(position) for position in self.take_positions(count)]

    def take_positions(self, count: int) -> list[int]:
        """Return the positions of the next prompts, those put back first."""
        repeated, self._again = self._again[:count], self._again[count:]
        start = self._taken
        self._taken += count - len(repeated)
        return [*repeated, *range(start, self._taken)]

    def put_back(self, positions: Iterable[int]) -> None:
        """Queue prompts to be taken again before any others."""
        self._again = sorted({*self._again, *positions})

    @property
    def due(self) -> int:
        """How many positions were put back, which are taken before any others."""
        return len(self._again)

    def at(self, position: int) -> T:
        epoch, number = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        return self._prompts[self._order[number]]

    def state_dict(self) -> StateDict:
        return {"taken": self._taken, "again": list(self._again)}

    def load_state_dict(self, state: StateDict) -> None:
        self._taken, self._again = int(state["taken"]), list(state["again"])

    def _shuffled(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts)).tolist()
        return order
