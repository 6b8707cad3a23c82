"""Shuffled epochs, the order that others build on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from retrain.plugins.curricula import Curriculum


class Epochs(Curriculum):
    """Endless epochs over `size` positions, for choices of any size.

    The order of an epoch depends only on the seed and the epoch's number. The state is how many were chosen.
    """

    repeats = True

    def __init__(self, size: int, seed: int) -> None:
        self._size, self._seed = size, seed
        self._chosen = 0
        self._epoch, self._order = 0, self._shuffled(0)

    def choose(self, count: int) -> list[int]:
        return [self.next() for _ in range(count)]

    def next(self) -> int:
        """Return the next position; an epoch may begin with it."""
        epoch, number = divmod(self._chosen, self._size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        self._chosen += 1
        return self._order[number]

    def state_dict(self) -> dict[str, Any]:
        return {"chosen": self._chosen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._chosen = int(state["chosen"])

    def _shuffled(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(self._size).tolist()
        return order
