"""Whether two runs do the same, to the last digit: by what their first steps were, as one short text.

Runs of one seed whose conditions differ in a way without effect take the same steps. The steps that count
begin with the first update, since before it even a learning rate has no effect.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from retrain.control.rules import StateDict

STEPS = 10  # that are compared


@dataclass
class FirstSteps:
    """Follows the first steps of a run."""

    steps: int = 0
    digest: str = ""

    def observe(self, values: Iterable[float | None], *, trained: bool) -> str:
        """Take a step's results; return the digest of the first steps once all are known, "" before.

        Args:
            values: results that no clock decides.
            trained: whether any completion entered the loss.
        """
        if self.steps < STEPS and (trained or self.steps):
            self.steps += 1
            text = f"{self.digest} {list(values)!r}"
            self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self.digest if self.steps == STEPS else ""

    def state_dict(self) -> StateDict:
        return asdict(self)

    def load_state_dict(self, state: StateDict) -> None:
        vars(self).update(state)
