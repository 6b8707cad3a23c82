"""Policy gradient with importance sampling: corrects for sampling from another policy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from retrain.base.rollouts import Floats, LossTerms


def evaluate(
    logprobs: Floats, sampler_logprobs: Floats, advantages: Floats, sequence: NDArray[np.int64]
) -> LossTerms:
    """Evaluate -r A per token, r = exp(logprob - sampler's logprob).

    The gradient is unbiased however far the policies are apart, but its variance is unbounded: stay close to
    on-policy or use a clipped loss.

    Source: Metelli et al., policy optimization via importance sampling, arXiv:1809.06098;
        with r = 1, REINFORCE (Williams, 1992).
    """
    ratio = np.exp(logprobs - sampler_logprobs)
    value: Floats = -ratio * advantages
    return LossTerms(value=value, slope=value, clipped=np.zeros(value.shape, dtype=np.bool_))
