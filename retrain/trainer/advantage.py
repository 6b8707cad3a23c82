"""Calls an advantage plugin so that unscored rollouts enter no mean, spread or count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from retrain import registry
from retrain.advantages import OVER_BATCH
from retrain.errors import RunFailedError
from retrain.rollouts import Floats

LEAST_ROLLOUTS = 2  # a single rollout has no baseline


def open_advantage(name: str, params: Mapping[str, Any]) -> Callable[[Floats], Floats]:
    """Return a function from rewards of shape (prompts, rollouts), NaN where unscored, to advantages.

    Advantages are finite, and exactly 0 for unscored rollouts.

    Raises:
        ConfigError: there is no such plugin.
    """
    function = registry.find("advantages", name)
    bound = partial(function, **params)
    whole = bool(getattr(function, OVER_BATCH, False))
    return partial(_estimate, name, bound, over_batch=whole)


def _estimate(
    name: str, function: Callable[[Floats], Floats], rewards: Floats, *, over_batch: bool
) -> Floats:
    scored = ~np.isnan(rewards)
    if over_batch or scored.all():
        return np.where(scored, _called(name, function, rewards, scored), 0.0)
    advantages: Floats = np.zeros(rewards.shape)
    counts = scored.sum(axis=1)
    for count in np.unique(counts[counts >= LEAST_ROLLOUTS]).tolist():
        groups = np.flatnonzero(counts == count)
        places = np.nonzero(scored[groups])  # row by row, `count` in each
        known = rewards[groups][places].reshape(len(groups), count)
        estimated = _called(name, function, known, np.ones(known.shape, dtype=np.bool_))
        advantages[groups[places[0]], places[1]] = estimated.ravel()
    return advantages


def _called(name: str, function: Callable[[Floats], Floats], rewards: Floats, scored: Any) -> Floats:
    """Call the plugin and check its result.

    Raises:
        RunFailedError: wrong shape, or a non-finite advantage of a scored rollout.
    """
    advantages = np.asarray(function(rewards.copy()), dtype=np.float64)
    if advantages.shape != rewards.shape:
        raise RunFailedError(
            f"advantage_mode {name!r} returned shape {advantages.shape} for rewards of shape "
            f"{rewards.shape}; needs the same shape"
        )
    if not np.isfinite(advantages[scored]).all():
        group, rollout = np.argwhere(scored & ~np.isfinite(advantages))[0]
        hint = "; leave NaN rewards (unscored) out of every mean" if not scored.all() else ""
        raise RunFailedError(
            f"advantage_mode {name!r} returned {advantages[group, rollout]} for a reward of "
            f"{rewards[group, rollout]:g}; an advantage must be a finite number{hint}"
        )
    return advantages
