"""How often to look, so that watching costs the machine next to nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

SHARE = 0.015  # of one core: below the 2 % that watching may cost, with room for what is not counted
SHORTEST_S, LONGEST_S = 0.5, 10.0
_KEPT = 0.7  # of the earlier cost in the average: one slow look does not make the view sluggish


@dataclass
class Pace:
    """Measures what a look costs and rests in proportion."""

    share: float = SHARE
    _cost_s: float = 0.0
    _looks: int = 0
    _began_s: float = field(default_factory=time.process_time)

    def rest_s(self) -> float:
        """Return how long to rest now, from the processor's time since this was last asked."""
        now_s = time.process_time()
        spent_s, self._began_s = now_s - self._began_s, now_s
        self._looks += 1
        if self._looks == 1:  # the first look reads everything and tells nothing of the next
            return SHORTEST_S
        self._cost_s = spent_s if self._looks == 2 else spent_s * (1 - _KEPT) + self._cost_s * _KEPT
        return min(LONGEST_S, max(SHORTEST_S, self._cost_s / self.share))
