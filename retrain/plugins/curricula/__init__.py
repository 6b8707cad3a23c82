"""Curricula: which prompts come next.

A plugin is one file or folder with `open_curriculum(prompts, *, seed, <params>) -> Curriculum`, called once
per run with the task's training prompts and the run's seed.

A choice with too few, unknown or repeated positions ends the run, as an exception does.

Not a plugin, but shared: `epochs` (the shuffled order).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.base.registry import PluginSpec
from retrain.base.rollouts import Floats


class Curriculum:
    """Chooses prompts by their positions in the task, learns from their rewards, and goes on after a resume.

    Derive from it and define `choose`, and the others where they differ from what stands here. Calls come one
    at a time. With asynchronous sampling, several choices are made before the first of them is observed.
    """

    repeats = False  # whether one choice may hold a prompt twice: for instance where an epoch ends within it

    def choose(self, count: int) -> Sequence[int]:
        """Return the positions of the next `count` prompts, from 0.

        No position comes twice in a choice of no more prompts than there are, unless `repeats` is set.
        """
        raise NotImplementedError

    def observe(self, positions: Sequence[int], rewards: Floats) -> None:
        """Learn from a step, once its update is taken.

        Args:
            positions: of the step's prompts, those that a refill dropped included.
            rewards: of shape (prompts, rollouts), NaN where a rollout is unscored.
        """

    def predict(self, positions: Sequence[int]) -> Floats | None:
        """Return the success rates that are expected of prompts, 0 to 1; None: it predicts nothing.

        Called before `observe` with the same positions; rows compare it with what was seen.
        """
        return None

    def success(self, rewards: Floats) -> Floats:
        """Return what `predict` predicts, from 0 to 1, of each reward."""
        return rewards.clip(0.0, 1.0)

    def state_dict(self) -> Mapping[str, Any]:
        """Return all that later choices depend on, as JSON takes it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


SPEC = PluginSpec(
    "curriculum",
    "open_curriculum",
    ("prompts",),
    given=("seed",),
    members=("choose", "observe", "predict", "success", "state_dict", "load_state_dict"),
    returns=Curriculum,
    has_defaults=True,
)
