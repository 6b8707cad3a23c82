"""Translates the run's loss into the API's loss function and parameters.

The API sums the loss over all tokens and clips ratios at absolute bounds, while ours are distances
from 1. All these losses are homogeneous in the advantage, L(w A) = w L(A) for w > 0, so token weights
are multiplied into the advantages and the API's sum is our normalised loss.
Formulas: https://tinker-docs.thinkingmachines.ai/losses.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from retrain.errors import ConfigError
from retrain.rollouts import SUPERVISED, Loss

Name = Literal["importance_sampling", "ppo", "cispo", "gspo", "cross_entropy"]
KNOWN = tuple(name for name in get_args(Name) if name != "cross_entropy")  # valid as a run's loss
UNCLIPPED = ("importance_sampling",)  # the others take two bounds


@dataclass(frozen=True, slots=True)
class ApiLoss:
    """A loss function of the API with its parameters."""

    name: Name
    config: Mapping[str, float]

    @property
    def is_per_rollout(self) -> bool:
        """Whether there is one ratio per rollout: the API then needs the mask of its tokens."""
        return self.name == "gspo"

    @property
    def is_supervised(self) -> bool:
        """Whether the loss takes target weights instead of sampler log-probabilities."""
        return self.name == "cross_entropy"


def loss_problem(name: str) -> str:
    """Return why the API cannot compute a loss; "" if it can."""
    if name in KNOWN:
        return ""
    return f"got {name!r}; the Tinker API computes {', '.join(KNOWN)} only"


def api_loss(loss: Loss) -> ApiLoss:
    """Translate a loss; missing clip bounds default to those of our own function.

    Raises:
        ConfigError: the API does not have this loss.
    """
    if loss.name == SUPERVISED:
        return ApiLoss("cross_entropy", {})
    problem = loss_problem(loss.name)
    if problem:
        raise ConfigError(f"[algorithm].loss_mode: {problem}")
    name = cast(Name, loss.name)
    if name in UNCLIPPED:
        return ApiLoss(name, {})
    parameters = inspect.signature(loss.evaluate).parameters
    low, high = (float(parameters[key].default) for key in ("clip_low", "clip_high"))
    return ApiLoss(name, {"clip_low_threshold": 1.0 - low, "clip_high_threshold": 1.0 + high})
