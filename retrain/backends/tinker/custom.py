"""Losses that the API does not compute: it is sent the slope that ours have at each token.

A forward pass returns the policy's log-probabilities. Our loss, with the KL term, turns them into a slope per
token, and the sum of slope x log-probability, which the API computes, has the same gradient. The SDK's
`forward_backward_custom` makes the same requests; here each holds a permit, no PyTorch is needed, and an
update is plain data, which is replayed exactly after a failure.

The entropy of the whole distribution is not known. Its gradient is minus the expectation of log-probability x
gradient of the log-probability, of which the tokens that the policy drew are an unbiased estimate. Their mean
log-probability is subtracted, which changes no expectation and takes most of the variance (Williams, 1992,
doi:10.1007/BF00992696).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from retrain.backends import Optimization, UpdateStats
from retrain.backends.objective import TokenData
from retrain.rollouts import Floats, Loss, LossTerms, TrainingSample


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A loss and its slopes at the policy's log-probabilities."""

    samples: list[TrainingSample]  # minus the weighted slopes as advantages
    loss: Loss  # slope x log-probability
    value: float  # of the original loss, with the KL term and the entropy bonus
    reference_kl: float | None  # nats per token

    @classmethod
    def of(
        cls,
        samples: Sequence[TrainingSample],
        loss: Loss,
        optimization: Optimization,
        logprobs: Floats,
        reference: Floats | None,
    ) -> Linear:
        """Linearize a loss at the policy's log-probabilities; `reference` has those of the base model."""
        data = TokenData.of(samples)
        terms, totals = data.evaluate(loss, logprobs, -logprobs, reference, optimization)
        bonus = optimization.entropy_bonus * data.bonus_weights * (logprobs - logprobs.mean())
        slope = data.weights * terms.slope + bonus
        ends = np.cumsum([len(sample.rollout.tokens) for sample in samples])[:-1]

        def line(now: Floats, *_: object) -> LossTerms:
            return LossTerms(slope * now, slope, terms.clipped)

        return cls(
            samples=[
                replace(one, advantages=-own, token_weight=1.0)
                for one, own in zip(samples, np.split(slope, ends), strict=True)
            ],
            loss=Loss(loss.name, line),
            value=totals.loss,
            reference_kl=None if reference is None else totals.reference_kl / len(logprobs),
        )

    def stats(self, found: UpdateStats) -> UpdateStats:
        """Return the statistics of the update on this loss as those of the original one."""
        value = self.value if np.isfinite(found.loss) else found.loss
        return replace(found, loss=value, reference_kl=self.reference_kl)
