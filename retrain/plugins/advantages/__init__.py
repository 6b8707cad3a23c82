"""Advantages: how much better each rollout is than its group's baseline.

A plugin is one file or folder with `estimate(rewards, *, <params>) -> advantages`, both of shape
(prompts, rollouts). A group whose advantages are all zero carries no signal. A reward that is not finite, or
a group without the rollouts that its baseline needs, is a ValueError.

With the keyword-only parameters `parts` and `weights`, or one of them, it also gets the parts of the reward:
by name, their values in the shape of the rewards, NaN where one is unscored; and by name, the weights of
those that the reward is the sum of. A run whose reward has none (`RewardPlugin.part_weights`) is refused.

An estimator never sees unscored rollouts. If a step has some, it is called once per number of scored
rollouts in a group, with the groups of that number; unscored rollouts, and groups with a single scored one,
get 0. An estimator whose statistics are those of the whole batch is marked with `over_batch` and called once,
with NaN for each unscored rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from retrain.base import registry
from retrain.base.registry import PluginSpec

OVER_BATCH = "over_batch"
F = TypeVar("F", bound=Callable[..., Any])


PARTS = ("parts", "weights")
SPEC = PluginSpec("advantage", "estimate", ("rewards",), may_take=PARTS, has_defaults=True)


def taken_parts(name: str) -> list[str]:
    """Return which of `PARTS` an estimator takes."""
    return [argument for argument in PARTS if registry.names_parameter("advantages", name, argument)]


def over_batch(estimate: F) -> F:
    """Mark an estimator whose statistics are those of the whole batch.

    It receives NaN for unscored rollouts, which it must leave out of every mean, spread and count.
    """
    setattr(estimate, OVER_BATCH, True)
    return estimate
