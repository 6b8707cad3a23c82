"""PPO's clipped importance-weighted policy loss."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrain.base.registry import Fraction, NotNegative
from retrain.base.rollouts import Floats, LossTerms


def evaluate(
    logprobs: Floats,
    sampler_logprobs: Floats,
    advantages: Floats,
    sequence: NDArray[np.int64],
    *,
    clip_low: Fraction = 0.2,
    clip_high: NotNegative = 0.2,
) -> LossTerms:
    """Evaluate -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token, r = exp(logprob - sampler's).

    Args:
        clip_low: distance of the lower bound from 1, in [0, 1].
        clip_high: distance of the upper bound from 1, 0 or more; a value above `clip_low` lets rare tokens
            grow likelier.

    Source: PPO, arXiv:1707.06347; separate bounds as in DAPO, arXiv:2503.14476.
    """
    low, high = 1.0 - clip_low, 1.0 + clip_high
    ratio = np.exp(logprobs - sampler_logprobs)
    value, cut = clipped_value(ratio, advantages, low, high)
    return LossTerms(value=value, slope=np.where(cut, 0.0, value), clipped=cut)


def clipped_value(
    ratio: Floats, advantages: Floats, low: float, high: float
) -> tuple[Floats, NDArray[np.bool_]]:
    """Return -min(ratio A, clip(ratio) A), and where it is flat, because the ratio is past the bound."""
    cut: NDArray[np.bool_] = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    value: Floats = -np.where(cut, np.clip(ratio, low, high), ratio) * advantages
    return value, cut
