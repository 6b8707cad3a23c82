"""The loss of a micro-batch and its exact gradient, by back-propagation through time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retrain.backends import Optimization
from retrain.backends.numpy.gru import (
    Packed,
    Trace,
    back_propagate,
    log_probabilities,
    one_hot,
    pack,
    unroll,
    unroll_prompts,
)
from retrain.backends.numpy.weights import Array, Weights
from retrain.backends.objective import TokenData, Totals
from retrain.rollouts import Floats, Loss, TrainingSample


def loss_gradient(
    weights: Weights,
    reference: Weights,
    prompts: Sequence[tuple[int, ...]],
    samples: Sequence[TrainingSample],
    loss: Loss,
    optimization: Optimization,
) -> tuple[Totals, Weights]:
    """Return the sum over tokens of weight x (loss + KL) - bonus weight x bonus x entropy, with its gradient.

    Equal prompts run once; the gradients of their rollouts are summed in the backward pass.

    Args:
        weights: the policy to evaluate.
        reference: reference policy of the KL term.
        prompts: each sample's prompt as token ids.
        samples: rollouts with their advantages and weights.
        loss: value and slope per token.
        optimization: weights of bonus and KL term, and the sampling temperature.
    """
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    owner = np.array([numbers[prompt] for prompt in prompts])
    packed = pack([sample.rollout.tokens for sample in samples])

    def run(policy: Weights) -> tuple[Trace, Trace, Array]:
        prompt_trace = unroll_prompts(policy, list(numbers))
        trace = unroll(policy, packed, prompt_trace.states[prompt_trace.packed.last()[owner]])
        return prompt_trace, trace, log_probabilities(policy, trace.states, optimization.temperature)

    prompt_trace, trace, logp = run(weights)
    prompt_ends = prompt_trace.packed.last()
    near = _chosen(run(reference)[2], packed) if optimization.kl_coef else None
    totals, by_logits = _logit_gradient(logp, near, packed, samples, loss, optimization)
    gradient = weights.zeros_like()
    gradient["output"][:] = trace.states.T @ by_logits
    gradient["output_bias"][:] = by_logits.sum(axis=0)
    by_start = back_propagate(weights, trace, by_logits @ weights["output"].T, gradient)
    by_prompt_state = np.zeros_like(prompt_trace.states)
    by_prompt_state[prompt_ends] = one_hot(owner, len(numbers), weights.flat.dtype.name).T @ by_start
    back_propagate(weights, prompt_trace, by_prompt_state, gradient)
    return totals, gradient


def _logit_gradient(
    logp: Array,
    reference: Floats | None,
    packed: Packed,
    samples: Sequence[TrainingSample],
    loss: Loss,
    optimization: Optimization,
) -> tuple[Totals, Array]:
    """Return the sums, and the gradient of the logits: shape (tokens, vocabulary), time-major."""
    probabilities = np.exp(logp)
    entropy = -(probabilities * logp).sum(axis=1)
    data = TokenData.of(samples)
    terms, totals = data.evaluate(
        loss, _chosen(logp, packed), entropy[packed.position], reference, optimization
    )
    slope = np.empty(len(logp), logp.dtype)
    slope[packed.position] = data.weights * terms.slope
    by_logits = -probabilities * slope[:, None]
    by_logits[packed.position, packed.elements] += slope[packed.position]
    bonus = np.empty_like(slope)
    bonus[packed.position] = optimization.entropy_bonus * data.bonus_weights
    by_logits += bonus[:, None] * probabilities * (logp + entropy[:, None])
    by_logits /= optimization.temperature or 1.0
    return totals, by_logits


def _chosen(logp: Array, packed: Packed) -> Floats:
    """Return the sampled tokens' log-probabilities, shape (tokens,), sequence after sequence."""
    chosen: Floats = logp[packed.position, packed.elements].astype(np.float64)
    return chosen
