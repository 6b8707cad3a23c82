"""Detect a change point in the curve, as opposed to noise and stalls, in one pass over the residuals.

Two-sided CUSUM (Page, Biometrika 41, 1954), with two rules for residuals that no curve explains: a step far
too slow is a stall until the next steps confirm it; a step far too fast proves that older ones were slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DRIFT = 0.5  # standard deviations per step that are ignored
ALARM = 7.0  # accumulated standard deviations; under one false alarm in 1000 steps of pure noise
CLIP = 3.0  # the most that one step can add, so that one stall raises no alarm
IMPLAUSIBLE = 0.7  # log of 2: halving or doubling the batch cannot explain a larger jump
SAME_STALL = 0.2  # logs; slow steps that differ by less are one change, not several stalls
CONFIRMING = 1  # earlier slow steps that confirm a change at a known size
CONFIRMING_NEW = 2  # the same at a new size: one pair of stalls there cost 45 % of a whole run
MOST_STALLS = 4  # consecutive, however much they differ

Residual = Literal["usual", "stall", "changed"]


@dataclass
class ChangeDetector:
    """CUSUM sums of standardized residuals."""

    faster: float = 0.0
    slower: float = 0.0
    stalls: int = 0  # consecutive
    stalled: float = 0.0  # surprise of the last stall

    def judge(self, surprise: float, deviation: float, noise: float, *, is_known: bool = True) -> Residual:
        """Classify one observation.

        Args:
            surprise: log of measured over predicted throughput.
            deviation: the prediction's standard deviation, noise included.
            noise: standard deviation of the noise alone.
            is_known: whether this size was measured often enough for a slow step to mean a change.
        """
        # steps that are equally slow confirm a change: stalls vary in length, a slower machine does not
        agrees = abs(surprise - self.stalled) < SAME_STALL + 2.0 * noise
        enough = (CONFIRMING if is_known else CONFIRMING_NEW) if agrees else MOST_STALLS
        if surprise < -(IMPLAUSIBLE + 2.0 * noise) and self.stalls < enough:
            self.stalls, self.stalled = self.stalls + 1, surprise
            return "stall"
        self.stalls = 0
        scaled = max(-CLIP, min(CLIP, surprise / deviation))
        self.faster = max(0.0, self.faster + scaled - DRIFT)
        self.slower = max(0.0, self.slower - scaled - DRIFT)
        implausible = surprise > IMPLAUSIBLE + 2.0 * noise
        if implausible or self.faster > ALARM or self.slower > ALARM:
            self.faster = self.slower = 0.0
            return "changed"
        return "usual"
