"""The order in which a run sees its training prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.rollouts import Prompt


class PromptStream:
    """Endless shuffled epochs over the training prompts, whatever the batch sizes.

    Epoch k's order depends on the seed and k alone, so the number of prompts taken is the whole state.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._taken = 0
        self._epoch, self._order = 0, self._shuffled(0)

    def take(self, count: int) -> list[Prompt]:
        """Give the next prompts; an epoch's end is crossed without a gap."""
        return [self._next() for _ in range(count)]

    def state_dict(self) -> dict[str, int]:
        """Give the cursor."""
        return {"taken": self._taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a cursor that `state_dict` gave."""
        self._taken = int(state["taken"])

    def _next(self) -> Prompt:
        epoch, position = divmod(self._taken, len(self._prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        self._taken += 1
        return self._prompts[self._order[position]]

    def _shuffled(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts)).tolist()
        return order
