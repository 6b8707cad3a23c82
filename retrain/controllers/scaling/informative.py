"""How much larger a batch is in groups that teach something.

A prompt whose rollouts all score alike teaches nothing: it is left out of the gradient, and a batch
of such prompts alone is no update. As fewer groups are informative, small batches skip more and more
updates while a large one still makes each of its own, from fewer groups: growing the batch eightfold
then buys less than eight times the groups per update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

SMOOTHING = 0.99  # per initial batch; the share may fall from nearly all to a few within some hundred
LEAST_SHARE = 1e-9  # keeps the formulas defined while nothing informative was seen


class InformativeGroups:
    """Running share of the prompts whose group is informative."""

    def __init__(self, init_batch_size: int) -> None:
        self._init_batch_size = init_batch_size
        self._sum = 0.0
        self._weight = 0.0  # 0 before any step

    @property
    def share(self) -> float:
        """Share of informative prompts; 1 before any step."""
        return min(1.0, max(LEAST_SHARE, self._sum / self._weight)) if self._weight else 1.0

    @property
    def per_initial_update(self) -> float:
        """Informative groups in an initial batch that has any, on average."""
        return self._init_batch_size * self.share / self._update_share(1.0)

    def count(self, informative: int, prompts: int) -> None:
        """Learn from a step, also from one that was no update."""
        keep = SMOOTHING ** (prompts / self._init_batch_size)
        self._sum = keep * self._sum + (1 - keep) * informative / prompts
        self._weight = keep * self._weight + (1 - keep)

    def effective_scale(self, scale: float) -> float:
        """Informative groups in an update of `scale` initial batches, over those in an initial update.

        It equals the number of initial updates that the same prompts would have made: `scale` where
        every group is informative, and 1 where hardly any is.
        """
        return scale * self._update_share(1.0) / self._update_share(scale)

    def state_dict(self) -> dict[str, float]:
        """Return everything as plain data."""
        return {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` gave."""
        self._sum, self._weight = float(state["sum"]), float(state["weight"])

    def _update_share(self, scale: float) -> float:
        """Return the chance that a batch of `scale` initial ones has an informative group."""
        if self.share == 1.0:
            return 1.0
        return -math.expm1(scale * self._init_batch_size * math.log1p(-self.share))
