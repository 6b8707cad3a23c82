"""The loss of a micro-batch and its exact gradient, by back-propagation through time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.backends import Optimization
from retrain.backends._gru import back_propagate, log_probabilities, one_hot, unroll, unroll_prompts
from retrain.backends._packed import Packed, pack
from retrain.backends._weights import Array, Weights
from retrain.rollouts import Loss, TrainingSample


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a micro-batch's tokens."""

    loss: float  # weighted, the entropy bonus included
    entropy: float
    clipped: int
    tokens: int

    @staticmethod
    def sum(parts: Sequence[Totals]) -> Totals:
        """Add micro-batches up."""
        return Totals(
            sum(part.loss for part in parts),
            sum(part.entropy for part in parts),
            sum(part.clipped for part in parts),
            sum(part.tokens for part in parts),
        )


def loss_gradient(
    weights: Weights,
    prompts: Sequence[tuple[int, ...]],
    samples: Sequence[TrainingSample],
    loss: Loss,
    optimization: Optimization,
) -> tuple[Totals, Weights]:
    """Differentiate the sum over tokens of weight x (loss - bonus x entropy).

    Equal prompts are run once; their rollouts' gradients meet again on the way back.

    Args:
        weights: the policy to evaluate.
        prompts: each sample's prompt as token ids.
        samples: rollouts with their advantages and weights.
        loss: value and slope per token.
        optimization: the entropy bonus, and the temperature that the rollouts were sampled at.
    """
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    owner = np.array([numbers[prompt] for prompt in prompts])
    prompt_trace = unroll_prompts(weights, list(numbers))
    prompt_ends = prompt_trace.packed.last()
    packed = pack([sample.rollout.tokens for sample in samples])
    trace = unroll(weights, packed, prompt_trace.states[prompt_ends[owner]])

    logp = log_probabilities(weights, trace.states, optimization.temperature)
    totals, by_logits = _logit_gradient(logp, packed, samples, loss, optimization)
    gradient = weights.zeros_like()
    gradient["output"][:] = trace.states.T @ by_logits
    gradient["output_bias"][:] = by_logits.sum(axis=0)
    by_start = back_propagate(weights, trace, by_logits @ weights["output"].T, gradient)
    by_prompt_state = np.zeros_like(prompt_trace.states)
    by_prompt_state[prompt_ends] = one_hot(owner, len(numbers), weights.flat.dtype.name).T @ by_start
    back_propagate(weights, prompt_trace, by_prompt_state, gradient)
    return totals, gradient


def _logit_gradient(
    logp: Array, packed: Packed, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
) -> tuple[Totals, Array]:
    """Give the sums, and the derivative in every logit: shape (tokens, vocabulary), time-major."""
    terms = loss.evaluate(
        logp[packed.position, packed.elements].astype(np.float64),
        np.concatenate([sample.rollout.logprobs for sample in samples]),
        np.concatenate([sample.advantages for sample in samples]),
        packed.sequence,
    )
    weight = np.array([sample.token_weight for sample in samples])[packed.sequence]
    probabilities = np.exp(logp)
    entropy = -(probabilities * logp).sum(axis=1)

    slope = np.empty(len(logp), logp.dtype)
    slope[packed.position] = weight * terms.slope
    by_logits = -probabilities * slope[:, None]
    by_logits[packed.position, packed.elements] += slope[packed.position]
    bonus = np.empty_like(slope)
    bonus[packed.position] = optimization.entropy_bonus * weight
    by_logits += bonus[:, None] * probabilities * (logp + entropy[:, None])
    by_logits /= optimization.temperature or 1.0
    total = float((weight * terms.value).sum() - np.dot(bonus, entropy))
    return Totals(total, float(entropy.sum()), int(terms.clipped.sum()), len(logp)), by_logits
