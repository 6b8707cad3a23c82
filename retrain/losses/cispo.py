"""CISPO: the importance weight is clipped, not the update, so that every token keeps a gradient."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrain.losses.ratios import log_ratios, ratio_bounds
from retrain.registry import Fraction, NotNegative
from retrain.rollouts import Floats, LossTerms


def evaluate(
    logprobs: Floats,
    sampler_logprobs: Floats,
    advantages: Floats,
    sequence: NDArray[np.int64],
    *,
    clip_low: Fraction = 1.0,
    clip_high: NotNegative = 4.0,
) -> LossTerms:
    """Evaluate -w A logprob per token, w = clip(r, 1 - clip_low, 1 + clip_high) held constant.

    r = exp(logprob - sampler's logprob). As w is a constant to the gradient, the slope is -w A;
    the value moves with the policy's log-probability and says little by itself.

    Args:
        clip_low: how far below 1 the weight may go, in [0, 1]; 1 is no lower bound, as published.
        clip_high: how far above 1, 0 or more; 4 is the low end of the range found robust by
            arXiv:2510.13786.

    Returns:
        `clipped` marks tokens whose weight was changed; their gradient is smaller or larger, not 0.

    Raises:
        ValueError: a bound is out of range, or the arrays differ in shape.

    Source: CISPO in MiniMax-M1, arXiv:2506.13585.
    """
    low, high = ratio_bounds(clip_low, clip_high)
    ratio = np.exp(log_ratios(logprobs, sampler_logprobs, advantages, sequence))
    slope: Floats = -np.clip(ratio, low, high) * advantages
    changed = ((ratio < low) | (ratio > high)) & (advantages != 0)
    return LossTerms(value=slope * logprobs, slope=slope, clipped=changed)
