"""The loss of a micro-batch with its exact gradient, by back-propagation through time, and the optimizers.

Source: Adam with bias correction, arXiv:1412.6980; clipping by the global norm, arXiv:1211.5063.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np

from retrain.backends import Optimization
from retrain.backends.numpy.gru import (
    Array,
    Ints,
    Trace,
    Weights,
    back_propagate,
    log_probabilities,
    one_hot,
    pack,
    unroll,
    unroll_prompts,
)
from retrain.backends.objective import TokenData, Totals
from retrain.base.rollouts import Floats, Loss, TrainingSample
from retrain.control.rules.scaling.rules import FIRST_SETTLED_STEP, adam_preconditioner

DECAY_MEAN, DECAY_SQUARE, EPSILON = 0.9, 0.999, 1e-8  # the paper's


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
        reference: reference policy of the KL term.
        prompts: each sample's prompt as token ids.
    """
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    owner = np.array([numbers[prompt] for prompt in prompts])
    placed = [sample.rollout.placed(unread=weights.shapes["output"][1] - 1) for sample in samples]
    packed = pack([read for read, _ in placed])
    starts = np.cumsum([0, *(len(read) for read, _ in placed)]).tolist()
    places = (start + place for start, (_, own) in zip(starts, placed, strict=False) for place in own)
    rows = packed.position[np.fromiter(places, np.int64)]  # of the states that predict sampled tokens
    targets = np.fromiter(chain.from_iterable(s.rollout.tokens for s in samples), np.int64, len(rows))

    def run(policy: Weights) -> tuple[Trace, Trace, Array]:
        prompt_trace = unroll_prompts(policy, list(numbers))
        trace = unroll(policy, packed, prompt_trace.states[prompt_trace.packed.last()[owner]])
        return prompt_trace, trace, log_probabilities(policy, trace.states, optimization.temperature)

    prompt_trace, trace, logp = run(weights)
    prompt_ends = prompt_trace.packed.last()
    near = _chosen(run(reference)[2], rows, targets) if optimization.kl_coef else None
    totals, by_logits = _logit_gradient(logp, near, rows, targets, samples, loss, optimization)
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
    rows: Ints,
    targets: Ints,
    samples: Sequence[TrainingSample],
    loss: Loss,
    optimization: Optimization,
) -> tuple[Totals, Array]:
    """Return the sums, and the gradient of the logits: shape (states, vocabulary), time-major."""
    probabilities = np.exp(logp)
    entropy = -(probabilities * logp).sum(axis=1)
    data = TokenData.of(samples)
    terms, totals = data.evaluate(loss, _chosen(logp, rows, targets), entropy[rows], reference, optimization)
    slope = np.zeros(len(logp), logp.dtype)  # no loss where the next token was given
    slope[rows] = data.weights * terms.slope
    by_logits = -probabilities * slope[:, None]
    by_logits[rows, targets] += slope[rows]
    bonus = np.zeros_like(slope)
    bonus[rows] = optimization.entropy_bonus * data.bonus_weights
    by_logits += bonus[:, None] * probabilities * (logp + entropy[:, None])
    by_logits /= optimization.temperature or 1.0
    return totals, by_logits


def _chosen(logp: Array, rows: Ints, targets: Ints) -> Floats:
    """Return the sampled tokens' log-probabilities, shape (tokens,), sequence after sequence."""
    chosen: Floats = logp[rows, targets].astype(np.float64)
    return chosen


class Sgd:
    """Plain stochastic gradient descent: each step is the gradient times the learning rate."""

    first_settled_step = 0  # from here on values of `sqr_norm` are comparable

    def __init__(self) -> None:
        self.steps = 0
        self.arrays: Mapping[str, Array] = {}  # in a checkpoint; loading overwrites them in place

    def step(self, weights: Array, gradient: Array, lr: float) -> None:
        """Take one step downhill, in place."""
        self.steps += 1
        weights -= lr * gradient

    def sqr_norm(self, gradient: Array) -> float:
        """Return the squared norm of a gradient, preconditioned as in the update."""
        return float(np.dot(gradient, gradient))


class Adam(Sgd):
    """Running moments of the gradient of one flat vector."""

    first_settled_step = FIRST_SETTLED_STEP

    def __init__(self, like: Array) -> None:
        super().__init__()
        self.mean, self.square = np.zeros_like(like), np.zeros_like(like)
        self.arrays = {"adam_mean": self.mean, "adam_square": self.square}

    def step(self, weights: Array, gradient: Array, lr: float) -> None:
        self.steps += 1
        self.mean += (1 - DECAY_MEAN) * (gradient - self.mean)
        self.square += (1 - DECAY_SQUARE) * (gradient * gradient - self.square)
        mean = self.mean / (1 - DECAY_MEAN**self.steps)
        square = self.square / (1 - DECAY_SQUARE**self.steps)
        weights -= lr * mean / (np.sqrt(square) + EPSILON)

    def sqr_norm(self, gradient: Array) -> float:
        return super().sqr_norm(
            gradient / adam_preconditioner(self.square, self.steps, DECAY_SQUARE, EPSILON)
        )


def clip_by_norm(gradient: Array, max_norm: float) -> float:
    """Clip `gradient` in place to norm `max_norm` and return its norm before clipping."""
    norm = float(np.sqrt(np.dot(gradient, gradient)))
    if norm > max_norm:
        gradient *= max_norm / norm
    return norm
