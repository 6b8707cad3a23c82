"""The order in which a run sees its training prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.rollouts import Prompt


class PromptStream:
    """Endless shuffled epochs over the training prompts, whatever the batch sizes.

    Epoch k's order depends on the seed and k alone, so (epoch, position) is the whole state.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._epoch, self._position = 0, 0
        self._order = self._shuffled(0)

    def take(self, count: int) -> list[Prompt]:
        """Give the next prompts; an epoch's end is crossed without a gap."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._start(self._epoch + 1, position=0)
            until = min(len(self._order), self._position + count - len(taken))
            taken += [self._prompts[i] for i in self._order[self._position : until]]
            self._position = until
        return taken

    def state_dict(self) -> dict[str, int]:
        """Give the cursor."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a cursor that `state_dict` gave."""
        self._start(int(state["epoch"]), int(state["position"]))

    def _start(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = self._shuffled(epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts)).tolist()
        return order
