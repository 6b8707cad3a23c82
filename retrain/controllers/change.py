"""Tells a changed curve from noise and from stalls, with one pass over the surprises.

Two-sided CUSUM (Page, Biometrika 41, 1954), and two rules for surprises no curve explains: a step far
too slow is a stall until the next one agrees; a step far too fast proves that older ones were slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DRIFT = 0.5  # standard deviations per step that are ignored
ALARM = 6.0  # accumulated standard deviations; about one false alarm in 1000 steps of pure noise
CLIP = 3.0  # what a single step can add, so that one stall raises no alarm
IMPLAUSIBLE = 0.7  # log of 2: halving or doubling the batch explains no larger jump

Verdict = Literal["usual", "stall", "changed"]


@dataclass
class ChangeDetector:
    """Sums of surprises in units of their standard deviation."""

    faster: float = 0.0
    slower: float = 0.0
    stalls: int = 0

    def judge(self, surprise: float, deviation: float, noise: float) -> Verdict:
        """Classify one observation.

        Args:
            surprise: log of measured over predicted throughput.
            deviation: the prediction's standard deviation, noise included.
            noise: standard deviation of the noise alone.
        """
        if surprise < -(IMPLAUSIBLE + 2.0 * noise) and self.stalls == 0:
            self.stalls = 1
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
