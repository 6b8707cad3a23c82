"""Whether the trainer's log-probabilities move away from the sampler's, steadily.

They never agree exactly, and differ more in some steps than in others. A mean over many steps that rises
several times in a row, to a multiple of what it was, is a sampler that computes something else than the
trainer, and more so with each update: often the beginning of a collapse.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

from retrain.controllers import StateDict

WINDOW = 10  # steps of a mean
RISES = 3  # in a row
FACTOR = 2.0  # of the first of these means
NOTABLE = 1e-3  # nats per token: rounding in bfloat16 stays below


@dataclass
class MismatchTrend:
    """Follows `mismatch_kl` from step to step."""

    window: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)  # of the last windows
    rise: str = ""  # the last one that was warned of

    def observe(self, mismatch_kl: float, step: int) -> str:
        """Take the value of a step; return a warning if it grows steadily, else ""."""
        self.window.append(mismatch_kl)
        if len(self.window) < WINDOW:
            return ""
        self.means = [*self.means, math.fsum(self.window) / WINDOW][-RISES - 1 :]
        self.window = []
        rises = all(later > sooner for sooner, later in zip(self.means, self.means[1:], strict=False))
        first, last = self.means[0], self.means[-1]
        if len(self.means) <= RISES or not rises or last < max(NOTABLE, FACTOR * first):
            return ""
        self.means = [last]  # the next warning needs another multiple
        self.rise = (
            f"mismatch_kl rose steadily from {first:.2g} to {last:.2g} nats per token in "
            f"{(RISES + 1) * WINDOW} steps, up to step {step}"
        )
        return self.rise

    def state_dict(self) -> StateDict:
        return asdict(self)

    def load_state_dict(self, state: StateDict) -> None:
        vars(self).update(state)
