"""A step's objective, shared by all backends: token weights, KL term, entropy bonus, and parts of a step.

A loss is a numpy function that returns value and slope per token. Each backend computes the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from retrain.backends import GradientMoments, Optimization, UpdateStats
from retrain.base.rollouts import Evaluate, Floats, Ints, Loss, LossTerms, TrainingSample
from retrain.records.step_row import Mismatch


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a micro-batch's tokens."""

    loss: float  # weighted, with the entropy bonus and the KL term
    entropy: float
    clipped: int
    tokens: int
    reference_kl: float
    sampler_kl: float
    sampler_gap: float  # absolute differences of log-probabilities
    largest_gap: float  # the largest of them
    taught: int  # tokens of which the teacher's likeliest one is known
    agreed: int  # of them, those where it is the policy's

    @staticmethod
    def sum(parts: Sequence[Totals]) -> Totals:
        total = Totals(*map(sum, zip(*map(astuple, parts), strict=True)))
        return replace(total, largest_gap=max(part.largest_gap for part in parts))

    def stats(
        self, grad_norm: float, moments: GradientMoments | None, optimization: Optimization
    ) -> UpdateStats:
        """Return the step's statistics, as means per token; the backend adds memory and work."""
        return UpdateStats(
            loss=self.loss,
            grad_norm=grad_norm,
            entropy=self.entropy / self.tokens,
            clip_fraction=self.clipped / self.tokens,
            moments=moments,
            reference_kl=self.reference_kl / self.tokens if optimization.kl_coef else None,
            approx_kl=self.sampler_kl / self.tokens,
            teacher_agreement=self.agreed / self.taught if self.taught else None,
            mismatch=Mismatch(
                kl=self.sampler_kl / self.tokens, mean=self.sampler_gap / self.tokens, max=self.largest_gap
            ),
        )


@dataclass(frozen=True, slots=True, eq=False)
class TokenData:
    """Inputs of a loss: flat arrays over completion tokens, sample after sample."""

    sampler_logprobs: Floats
    advantages: Floats
    weights: Floats
    bonus_weights: Floats  # of the entropy bonus
    sequence: Ints  # index of each token's sample
    teachers: Ints  # the token that a sample's teacher finds likeliest; -1 if not known

    @classmethod
    def of(cls, samples: Sequence[TrainingSample]) -> TokenData:
        """Return the data of at least one sample."""
        counts = [len(sample.rollout.tokens) for sample in samples]
        likeliest = [sample.teacher.likeliest if sample.teacher else None for sample in samples]
        return cls(
            sampler_logprobs=np.concatenate(
                [sample.rollout.logprobs for sample in samples], dtype=np.float64
            ),
            advantages=np.concatenate([sample.advantages for sample in samples]),
            weights=np.repeat([sample.token_weight for sample in samples], counts),
            bonus_weights=np.repeat([sample.bonus_weight for sample in samples], counts),
            sequence=np.repeat(np.arange(len(samples)), counts),
            teachers=np.concatenate(
                [np.full(n, -1) if ids is None else ids for n, ids in zip(counts, likeliest, strict=True)]
            ),
        )

    def evaluate(
        self,
        loss: Loss,
        logprobs: Floats,
        entropies: Floats,
        reference: Floats | None,
        optimization: Optimization,
        likeliest: Ints | None = None,
    ) -> tuple[LossTerms, Totals]:
        """Return value and slope per token, including the KL term, and the sums over tokens.

        Args:
            logprobs, entropies: of the policy at each token, nats.
            reference: log-probabilities under the policy before training; None without a KL term.
            likeliest: the token that the policy finds likeliest; needed only beside `teachers`.
        """
        terms, apart = loss.evaluate(logprobs, self.sampler_logprobs, self.advantages, self.sequence), 0.0
        if reference is not None:
            terms, apart = with_kl(terms, logprobs, reference, optimization.kl_coef)
        gaps = np.abs(logprobs - self.sampler_logprobs)
        known = self.teachers >= 0 if likeliest is not None else np.zeros(len(logprobs), np.bool_)
        bonus = optimization.entropy_bonus * float(np.dot(self.bonus_weights, entropies))
        return terms, Totals(
            loss=float(np.dot(self.weights, terms.value)) - bonus,
            entropy=float(entropies.sum()),
            clipped=int(terms.clipped.sum()),
            tokens=len(logprobs),
            reference_kl=apart,
            sampler_kl=divergence(self.sampler_logprobs - logprobs),
            sampler_gap=float(np.sum(gaps)),
            largest_gap=float(np.max(gaps, initial=0.0)),
            taught=int(known.sum()),
            agreed=int((known & (self.teachers == likeliest)).sum()),
        )


def jensen_shannon(policy: Floats, teacher: Floats, beta: float) -> tuple[Floats, Floats]:
    """Return the generalised Jensen-Shannon divergence, and its gradient in the policy's logits.

    JSD = beta KL(teacher || M) + (1 - beta) KL(policy || M), with M = beta teacher + (1 - beta) policy; at
    1 it is KL(policy || teacher), at 0 KL(teacher || policy).

    Args:
        policy, teacher: log-probabilities of all tokens, (rows, tokens).

    Returns:
        In nats, shapes (rows,) and (rows, tokens); the gradient is in the logits that `policy` normalises.

    Source: Agarwal et al. 2024, arXiv:2306.13649, equations 1 and 2; beta as in TRL's GKDTrainer.
    """
    own, its = np.exp(policy), np.exp(teacher)
    if beta == 0:
        return (its * (teacher - policy)).sum(axis=-1), own - its
    mixture = teacher if beta == 1 else np.logaddexp(policy + math.log1p(-beta), teacher + math.log(beta))
    share = 1.0 if beta == 1 else 1 - beta  # of the policy's part
    weighted = share * own * (policy - mixture)
    value = weighted.sum(axis=-1)
    gradient = weighted - own * value[..., None]
    return (value if beta == 1 else value + beta * (its * (teacher - mixture)).sum(axis=-1)), gradient


def divergence(apart: Floats) -> float:
    """Return the sum of exp(-apart) - 1 + apart, for log-probabilities that are `apart` at drawn tokens.

    It estimates the KL divergence, in nats, of the policy that drew them from the other, and is never
    negative. Source: Schulman, "Approximating KL divergence" (2020), k3.
    """
    with np.errstate(over="ignore"):
        return float(np.sum(np.expm1(-apart) + apart))


def with_kl(terms: LossTerms, logprobs: Floats, reference: Floats, kl_coef: float) -> tuple[LossTerms, float]:
    """Return terms with kl_coef * (logprob - reference's)^2 / 2 added per token, and the KL divergence.

    The added gradient, kl_coef * (logprob - reference's) times that of the log-probability, is an unbiased
    estimate of that of kl_coef * KL(policy || reference) for tokens drawn from the policy. The divergence, in
    nats and summed over tokens, is estimated with less variance than by the difference, and never negative.

    Source: Schulman, "Approximating KL divergence" (2020), k2 and k3; why k2's gradient, arXiv:2510.01555.
    """
    apart = logprobs - reference
    value, slope = terms.value + kl_coef * apart**2 / 2, terms.slope + kl_coef * apart
    return replace(terms, value=value, slope=slope), divergence(apart)


def split_by_group(samples: Sequence[TrainingSample], parts: int) -> list[list[TrainingSample]]:
    """Return samples cut into at most `parts` of nearly equal numbers of whole prompt groups."""
    groups: dict[int, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    members = list(groups.values())
    count = min(max(parts, 1), len(members))
    cuts = [round(number * len(members) / count) for number in range(count + 1)]
    return [[sample for group in members[start:end] for sample in group] for start, end in pairwise(cuts)]


def scale_to_step(squares: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return the squared norms of n parts on the scale of the step's gradient, which is their sum.

    A part with the share w of the groups (`counts`) is w times its own mean gradient. Its squared norm over
    w^2 is that of the mean; the factor n w weights each part by its size, which keeps the estimates of
    `GradientNoiseScale` unbiased.
    """
    total = len(counts) * sum(counts)
    return [square * total / count for square, count in zip(squares, counts, strict=True)]


def moments_of(
    squares: Sequence[float],
    parts: Sequence[Sequence[TrainingSample]],
    gradient: Sequence[Any],
    previous: Sequence[Any],
    sqr_norm: Callable[[Sequence[Any]], float],
) -> GradientMoments | None:
    """Return the moments of a step's parts; for a single part, of it and the previous step; None if unknown.

    Args:
        squares: the squared norm of each part's gradient.
        parts: the samples of each part.
        gradient: of the step, array by array.
        previous: that of the previous step, if it had a single part; otherwise empty.
        sqr_norm: squared norm of a gradient, preconditioned as in the optimizer's update.
    """
    consecutive = len(squares) == 1
    if consecutive and not previous:
        return None
    if not consecutive:
        squares = scale_to_step(squares, [len({sample.group for sample in part}) for part in parts])
    else:
        squares = [sqr_norm(previous), sqr_norm(gradient)]
        gradient = [(now + before) / 2 for now, before in zip(gradient, previous, strict=True)]
    return GradientMoments(np.array(squares)[:, None], np.array([sqr_norm(gradient)]), consecutive)


@dataclass(frozen=True, slots=True)
class RatioCap:
    """How far the trainer's probability may exceed the sampler's, as an option of any loss.

    Sampler and trainer compute different log-probabilities even for the same weights, and differ more for
    stale samples. A few ratios far above 1 then make up most of the gradient.
    """

    ratio: float  # the highest
    scope: Literal["token", "sequence"] = "token"  # of a token, or of a whole rollout
    mode: Literal["truncate", "mask"] = "truncate"  # weigh as if the ratio were the highest, or leave out

    def limit(self, evaluate: Evaluate) -> Evaluate:
        """Return a loss whose terms are multiplied by min(r, ratio) / r, or by 0 where r > ratio.

        The factor is held constant in the gradient. For losses that weigh by r, truncation replaces r by
        min(r, ratio). A `token` cap is for losses whose value at a token depends on that token alone.

        Source: Ionides, Truncated importance sampling (2008); in RL, arXiv:1802.01561.
        """

        return partial(self._limited, evaluate)

    def _limited(
        self,
        evaluate: Evaluate,
        logprobs: Floats,
        sampler_logprobs: Floats,
        advantages: Floats,
        sequence: NDArray[np.int64],
    ) -> LossTerms:
        terms = evaluate(logprobs, sampler_logprobs, advantages, sequence)
        log_ratio: Floats = logprobs - sampler_logprobs
        if self.scope == "sequence":
            _, number = np.unique(sequence, return_inverse=True)
            log_ratio = np.bincount(number, weights=log_ratio).astype(np.float64)[number]
        excess = np.maximum(log_ratio - math.log(self.ratio), 0.0)
        factor = np.exp(-excess) if self.mode == "truncate" else np.where(excess > 0, 0.0, 1.0)
        return LossTerms(terms.value * factor, terms.slope * factor, terms.clipped | (excess > 0))
