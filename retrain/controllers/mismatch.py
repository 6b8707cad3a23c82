"""Whether the trainer's log-probabilities move away from the sampler's, steadily.

They never agree exactly, and differ more in some steps than in others. A mean over many steps that rises
several times in a row, to a multiple of what it was, is a sampler that computes something else than the
trainer, and more so with each update: often the beginning of a collapse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, pairwise

from retrain.controllers import StateDict

WINDOW = 10  # steps of a mean
RISES = 3  # in a row
FACTOR = 2.0  # of the first of these means
NOTABLE = 1e-3  # nats per token: rounding in bfloat16 stays below
CERTAIN = 3.0  # standard deviations of the trend's score: means of few steps rise by chance


@dataclass
class MismatchTrend:
    """Follows `mismatch_kl` from step to step."""

    values: list[float] = field(default_factory=list)  # of the last windows
    rise: str = ""  # the last one that was warned of

    def observe(self, mismatch_kl: float, step: int) -> str:
        """Take the value of a step; return a warning if it grows steadily, else ""."""
        self.values.append(mismatch_kl)
        if len(self.values) < (RISES + 1) * WINDOW:
            return ""
        values = self.values[-(RISES + 1) * WINDOW :]
        self.values = values[WINDOW:]
        means = [math.fsum(values[at : at + WINDOW]) / WINDOW for at in range(0, len(values), WINDOW)]
        rises = all(later > sooner for sooner, later in pairwise(means))
        first, last = means[0], means[-1]
        if not rises or last < max(NOTABLE, FACTOR * first) or not _is_trend(values):
            return ""
        self.values = values[-WINDOW:]  # the next warning needs another multiple
        self.rise = (
            f"mismatch_kl rose steadily from {first:.2g} to {last:.2g} nats per token in "
            f"{len(values)} steps, up to step {step}"
        )
        return self.rise

    def state_dict(self) -> StateDict:
        return asdict(self)

    def load_state_dict(self, state: StateDict) -> None:
        vars(self).update(state)


def _is_trend(values: Sequence[float]) -> bool:
    """Whether more pairs of values rise than fall, beyond chance.

    Source: Mann 1945, Nonparametric tests against trend, doi:10.2307/1907187.
    """
    count = len(values)
    score = sum((later > sooner) - (later < sooner) for sooner, later in combinations(values, 2))
    return score >= CERTAIN * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
