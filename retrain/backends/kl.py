"""Keeps a policy near its reference, the model before training: one definition for all backends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from retrain.rollouts import Floats, LossTerms


def with_kl(terms: LossTerms, logprobs: Floats, reference: Floats, kl_coef: float) -> LossTerms:
    """Add kl_coef * (logprob - reference's)^2 / 2 to each token's loss.

    Its gradient, kl_coef * (logprob - reference's) times that of the log-probability, is an unbiased
    estimate of that of kl_coef * KL(policy || reference) for tokens drawn from the policy.

    Source: Schulman, "Approximating KL divergence" (2020), k2; why its gradient and not that of k3,
        arXiv:2510.01555.
    """
    apart = logprobs - reference
    return replace(terms, value=terms.value + kl_coef * apart**2 / 2, slope=terms.slope + kl_coef * apart)


def estimated_kl(logprobs: Floats, reference: Floats) -> float:
    """Estimate the sum over tokens of KL(policy || reference) in nats; never negative.

    Source: Schulman, "Approximating KL divergence" (2020), k3: unbiased for tokens drawn from the
        policy, with less variance than the plain difference.
    """
    apart = reference - logprobs
    return float(np.sum(np.expm1(apart) - apart))
