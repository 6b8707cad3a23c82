"""CISPO: clips the importance weight instead of the update, so that every token keeps a gradient."""

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
    clip_low: Fraction = 1.0,
    clip_high: NotNegative = 4.0,
) -> LossTerms:
    """Evaluate -w A logprob per token, w = clip(r, 1 - clip_low, 1 + clip_high) held constant.

    r = exp(logprob - sampler's logprob). The gradient treats w as a constant, so the slope is -w A. The
    value moves with the policy's log-probability and means little by itself.

    Args:
        clip_low: distance of the lower bound from 1, in [0, 1]; 1 is no lower bound, as published.
        clip_high: distance of the upper bound from 1, 0 or more; 4 is the low end of the range that
            arXiv:2510.13786 found robust.

    Returns:
        `clipped` marks tokens whose weight was clipped; their gradient is smaller or larger, not 0.

    Source: CISPO in MiniMax-M1, arXiv:2506.13585.
    """
    low, high = 1.0 - clip_low, 1.0 + clip_high
    ratio = np.exp(logprobs - sampler_logprobs)
    slope: Floats = -np.clip(ratio, low, high) * advantages
    changed = ((ratio < low) | (ratio > high)) & (advantages != 0)
    return LossTerms(value=slope * logprobs, slope=slope, clipped=changed)
