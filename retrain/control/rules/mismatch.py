"""Whether the trainer's log-probabilities move away from the sampler's, steadily.

They never agree exactly, and differ more in some steps than in others. A mean over many steps that rises
several times in a row, to a multiple of what it was, is a sampler that computes something else than the
trainer, and more so with each update: often the beginning of a collapse. Differences of successive steps are
alike, so that their means wander without a cause: a rise counts if its trend stands out of such noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np

from retrain.control.rules import StateDict
from retrain.control.rules.persistent_noise import trend_score

WINDOW = 10  # steps between two looks
RISES = 3  # in a row, of the means of a span's quarters
FACTOR = 2.0  # of the first of these means
NOTABLE = 1e-3  # nats per token: rounding in bfloat16 stays below
LEAST = 1e-5  # below it, logs tell rounding from rounding
# Steps looked at together, and the standard errors that the trend of their logs needs: noise with an
# autocorrelation of 0.9 reaches each in about 1 % of runs of 500 steps. Few steps tell little of that noise.
SPANS: Mapping[int, float] = {40: 14.5, 80: 9.5, 160: 5.6, 320: 3.5}


@dataclass
class MismatchTrend:
    """Follows `mismatch_kl` from step to step."""

    values: list[float] = field(default_factory=list)  # of the longest span, or since the last warning
    rise: str = ""  # the last one that was warned of

    def observe(self, mismatch_kl: float, step: int) -> str:
        """Take the value of a step; return a warning if it grows steadily, else ""."""
        self.values.append(mismatch_kl)
        if len(self.values) % WINDOW:
            return ""
        self.values = self.values[-max(SPANS) :]
        for span, certain in SPANS.items():
            values = self.values[-span:]
            if len(values) < span:
                continue
            size = span // (RISES + 1)
            means = [math.fsum(values[at : at + size]) / size for at in range(0, span, size)]
            rises = all(later > sooner for sooner, later in pairwise(means))
            is_notable = means[-1] >= max(NOTABLE, FACTOR * means[0])
            if rises and is_notable and trend_score(np.log(np.maximum(values, LEAST))) >= certain:
                self.values = values[-WINDOW:]  # the next warning needs another multiple
                self.rise = (
                    f"mismatch_kl rose steadily from {means[0]:.2g} to {means[-1]:.2g} nats per token in "
                    f"{span} steps, up to step {step}"
                )
                return self.rise
        return ""

    def state_dict(self) -> StateDict:
        return asdict(self)

    def load_state_dict(self, state: StateDict) -> None:
        vars(self).update(state)
