"""GSPO: one importance ratio per rollout, clipped as a whole."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrain.base.registry import Fraction, NotNegative
from retrain.base.rollouts import Floats, LossTerms
from retrain.plugins.losses.ppo import clipped_value


def evaluate(
    logprobs: Floats,
    sampler_logprobs: Floats,
    advantages: Floats,
    sequence: NDArray[np.int64],
    *,
    clip_low: Fraction = 3e-4,
    clip_high: NotNegative = 4e-4,
) -> LossTerms:
    """Evaluate -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) per token with the rollout's ratio s.

    s = exp(mean over the rollout's tokens of logprob - sampler's logprob), the length-normalised
    likelihood ratio. Every token's value depends on s, so the slope at any token of a rollout of
    n tokens is the mean over its tokens of -s A, 0 where clipped. The published objective weighs
    every rollout equally, as `loss_normalization = "sequence"` does; with "token", longer ones weigh more.

    Args:
        clip_low, clip_high: as in `ppo`; the published values are small because s averages over many
            tokens.

    Returns:
        `clipped` marks tokens whose own term of the rollout's gradient was clipped.

    Source: GSPO, arXiv:2507.18071.
    """
    low, high = 1.0 - clip_low, 1.0 + clip_high
    ratio = np.exp(_mean_by_sequence(logprobs - sampler_logprobs, sequence))
    value, cut = clipped_value(ratio, advantages, low, high)
    slope = _mean_by_sequence(np.where(cut, 0.0, value), sequence)
    return LossTerms(value=value, slope=slope, clipped=cut)


def _mean_by_sequence(values: Floats, sequence: NDArray[np.int64]) -> Floats:
    """Return for each token the mean over its sequence: shape (tokens,)."""
    _, number = np.unique(sequence, return_inverse=True)
    lengths = np.bincount(number)
    means: Floats = (np.bincount(number, weights=values) / np.maximum(lengths, 1))[number]
    return means
