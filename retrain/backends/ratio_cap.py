"""Limits importance ratios, as an option of any loss.

Sampler and trainer compute different log-probabilities even for the same weights, and differ more for stale
samples. A few ratios far above 1 then make up most of the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from retrain.rollouts import Evaluate, Floats, LossTerms


@dataclass(frozen=True, slots=True)
class RatioCap:
    """How far the trainer's probability may exceed the sampler's."""

    ratio: float  # the highest
    scope: Literal["token", "sequence"] = "token"  # of a token, or of a whole rollout
    mode: Literal["truncate", "mask"] = "truncate"  # weigh as if the ratio were the highest, or leave out

    def limit(self, evaluate: Evaluate) -> Evaluate:
        """Return a loss whose terms are multiplied by min(r, ratio) / r, or by 0 where r > ratio.

        The factor is held constant in the gradient. For losses that weigh by r, truncation replaces r by
        min(r, ratio). A `token` cap is for losses whose value at a token depends on that token alone.

        Source: Ionides, Truncated importance sampling (2008); in RL, arXiv:1802.01561.
        """

        def limited(
            logprobs: Floats, sampler_logprobs: Floats, advantages: Floats, sequence: NDArray[np.int64]
        ) -> LossTerms:
            terms = evaluate(logprobs, sampler_logprobs, advantages, sequence)
            log_ratio: Floats = logprobs - sampler_logprobs
            if self.scope == "sequence":
                _, number = np.unique(sequence, return_inverse=True)
                log_ratio = np.bincount(number, weights=log_ratio).astype(np.float64)[number]
            excess = np.maximum(log_ratio - math.log(self.ratio), 0.0)
            factor = np.exp(-excess) if self.mode == "truncate" else np.where(excess > 0, 0.0, 1.0)
            return LossTerms(terms.value * factor, terms.slope * factor, terms.clipped | (excess > 0))

        return limited
