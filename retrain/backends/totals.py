"""What a step's micro-batches add up to, and what an optimizer step reports of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrain.backends import GradientMoments, Optimization, UpdateStats


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a micro-batch's tokens."""

    loss: float  # weighted, with the entropy bonus and the KL term
    entropy: float
    clipped: int
    tokens: int
    reference_kl: float

    @staticmethod
    def sum(parts: Sequence[Totals]) -> Totals:
        """Add micro-batches up."""
        return Totals(
            sum(part.loss for part in parts),
            sum(part.entropy for part in parts),
            sum(part.clipped for part in parts),
            sum(part.tokens for part in parts),
            sum(part.reference_kl for part in parts),
        )

    def stats(
        self, grad_norm: float, moments: GradientMoments | None, optimization: Optimization
    ) -> UpdateStats:
        """Return the step's statistics, as means per token; memory and work are for the backend to add."""
        return UpdateStats(
            loss=self.loss,
            grad_norm=grad_norm,
            entropy=self.entropy / self.tokens,
            clip_fraction=self.clipped / self.tokens,
            moments=moments,
            reference_kl=self.reference_kl / self.tokens if optimization.kl_coef else None,
        )
