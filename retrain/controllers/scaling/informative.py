"""Batch scale counted in informative groups.

A prompt whose rollouts all have the same reward has no gradient; a batch of only such prompts makes no
update. As fewer groups are informative, small batches skip more updates, while large batches still make
every update from fewer groups: an eight times larger batch then has less than eight times the informative
groups per update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

SMOOTHING = 0.99  # per initial batch; the share can drop from nearly all to a few within some hundred batches
LEAST_SHARE = 1e-9  # keeps the formulas defined before the first informative group


class InformativeGroups:
    """Moving average of the fraction of prompts whose group is informative."""

    def __init__(self, init_batch_size: int) -> None:
        self._init_batch_size = init_batch_size
        self._sum = 0.0
        self._weight = 0.0  # 0 before any step

    @property
    def share(self) -> float:
        """Fraction of informative prompts; 1 before the first step."""
        return min(1.0, max(LEAST_SHARE, self._sum / self._weight)) if self._weight else 1.0

    @property
    def per_initial_update(self) -> float:
        """Mean number of informative groups in initial batches that have at least one."""
        return self._init_batch_size * self.share / self._update_share(1.0)

    def count(self, informative: int, prompts: int) -> None:
        """Count the groups of a step, with or without an update."""
        keep = SMOOTHING ** (prompts / self._init_batch_size)
        self._sum = keep * self._sum + (1 - keep) * informative / prompts
        self._weight = keep * self._weight + (1 - keep)

    def effective_scale(self, scale: float) -> float:
        """Return the informative groups per update of `scale` initial batches, relative to one initial batch.

        Equals the number of updates that the same prompts would have made in initial batches: `scale` if
        every group is informative, 1 if hardly any is.
        """
        return scale * self._update_share(1.0) / self._update_share(scale)

    def state_dict(self) -> dict[str, float]:
        """Return everything as plain data."""
        return {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore a `state_dict`."""
        self._sum, self._weight = float(state["sum"]), float(state["weight"])

    def _update_share(self, scale: float) -> float:
        """Return the probability that a batch of `scale` initial batches has an informative group."""
        if self.share == 1.0:
            return 1.0
        return -math.expm1(scale * self._init_batch_size * math.log1p(-self.share))
