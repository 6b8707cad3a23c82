"""The test of a campaign with `[decision]`, and what a look at one of its conditions found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from retrain.config.campaign import Decide
from retrain.controllers.sequential import Look, SequentialComparison
from retrain.records.decision import ConditionDecision

FOUND = ("better", "worse")


def comparison_of(table: Decide, conditions: int) -> SequentialComparison:
    """Return the test that a table asks for, of so many conditions with the reference among them."""
    is_early, smallest = table.allocate == "auto", table.smallest_difference
    return SequentialComparison(table.max_seeds, table.error, smallest, conditions - 1, is_early)


@dataclass(frozen=True)
class Found:
    """A look at a condition; described only where it is needed, as an interval takes a hundred looks."""

    condition: str
    verdict: str
    pairs: Sequence[tuple[float, float]]
    look: Look | None  # None: too few pairs
    planned: SequentialComparison  # with the error that is sure for each condition
    reason: str = ""  # why it gets no more seeds although some are left

    def described(self) -> ConditionDecision:
        """Return the verdict with its interval.

        The interval has the error that each condition has from the first: it holds for all at once. Holm's
        procedure may find a difference whose sign that interval leaves open; the sign is certain then.
        """
        if self.look is None:
            return ConditionDecision(self.condition, self.verdict, len(self.pairs), reason=self.reason)
        values, reference = np.array(self.pairs).T
        alone = float(values.var(ddof=1) + reference.var(ddof=1))
        removed = 1 - float((values - reference).var(ddof=1)) / alone if alone > 0 else None
        low, high = replace(self.look, comparison=self.planned).interval
        if self.look.verdict in FOUND:
            low, high = (max(low, 0.0), high) if self.look.difference > 0 else (low, min(high, 0.0))
        return ConditionDecision(
            self.condition,
            self.verdict,
            self.look.seeds,
            self.look.difference,
            low if math.isfinite(low) else None,
            high if math.isfinite(high) else None,
            min(1.0, self.look.p_value * self.planned.error / self.look.comparison.error),
            removed,
            self.reason,
        )
