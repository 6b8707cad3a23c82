"""Whether the trainer's log-probabilities move away from the sampler's, steadily.

They never agree exactly, and differ more in some steps than in others. A mean over many steps that rises
several times in a row, to a multiple of what it was, is a sampler that computes something else than the
trainer, and more so with each update: often the beginning of a collapse.
"""

from __future__ import annotations

import math

from retrain.controllers import StateDict

WINDOW = 10  # steps of a mean
RISES = 3  # in a row
FACTOR = 2.0  # of the first of these means
NOTABLE = 1e-3  # nats per token: rounding in bfloat16 stays below


class MismatchTrend:
    """Follows `mismatch_kl` from step to step."""

    def __init__(self) -> None:
        self._window: list[float] = []
        self._means: list[float] = []  # of the last windows
        self.rise = ""  # the last one that was warned of

    def observe(self, mismatch_kl: float, step: int) -> str:
        """Take the value of a step; return a warning if it grows steadily, else ""."""
        self._window.append(mismatch_kl)
        if len(self._window) < WINDOW:
            return ""
        self._means = [*self._means, math.fsum(self._window) / WINDOW][-RISES - 1 :]
        self._window = []
        rises = all(later > sooner for sooner, later in zip(self._means, self._means[1:], strict=False))
        first, last = self._means[0], self._means[-1]
        if len(self._means) <= RISES or not rises or last < max(NOTABLE, FACTOR * first):
            return ""
        self._means = [last]  # the next warning needs another multiple
        self.rise = (
            f"mismatch_kl rose steadily from {first:.2g} to {last:.2g} nats per token in "
            f"{(RISES + 1) * WINDOW} steps, up to step {step}"
        )
        return self.rise

    def state_dict(self) -> StateDict:
        return {"window": list(self._window), "means": list(self._means), "rise": self.rise}

    def load_state_dict(self, state: StateDict) -> None:
        self._window, self._means = list(state["window"]), list(state["means"])
        self.rise = state.get("rise", "")
