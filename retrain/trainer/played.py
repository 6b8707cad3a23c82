"""An episode while it is played."""

from __future__ import annotations

from dataclasses import dataclass, field

from retrain.rollouts import Rollout


@dataclass(slots=True)
class Played:
    """An episode so far."""

    rollout: Rollout
    rewards: list[float | None] = field(default_factory=list)
    done: bool = False
    others: list[Rollout] = field(default_factory=list)  # earlier turns, if each is a sample of its own

    @property
    def tokens(self) -> int:
        """Sampled ones, of all turns."""
        return sum(len(one.tokens) for one in (*self.others, self.rollout))

    def take(self, rollout: Rollout) -> None:
        """Go on to a rollout with another turn."""
        if self.rollout.tokens and rollout.prompt is not self.rollout.prompt:
            self.others.append(self.rollout)
        self.rollout = rollout
