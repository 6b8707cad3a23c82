"""Optimizers over one flat vector: Adam with bias correction, plain SGD, and global-norm clipping.

Source: Adam, arXiv:1412.6980; clipping, arXiv:1211.5063.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from retrain.backends.numpy.weights import Array
from retrain.controllers.scaling.noise_scale import FIRST_SETTLED_STEP, adam_preconditioner

DECAY_MEAN, DECAY_SQUARE, EPSILON = 0.9, 0.999, 1e-8  # the paper's


class Adam:
    """Running moments of the gradient of one flat vector, and the number of steps taken."""

    def __init__(self, like: Array) -> None:
        self.mean = np.zeros_like(like)
        self.square = np.zeros_like(like)
        self.steps = 0

    @property
    def is_settled(self) -> bool:
        """Whether the preconditioner of `sqr_norm` has warmed up, so that values are comparable."""
        return self.steps >= FIRST_SETTLED_STEP

    @property
    def arrays(self) -> Mapping[str, Array]:
        """Return the checkpoint's arrays; loading overwrites them in place."""
        return {"adam_mean": self.mean, "adam_square": self.square}

    def step(self, weights: Array, gradient: Array, lr: float) -> None:
        """Take one step downhill, in place."""
        self.steps += 1
        self.mean += (1 - DECAY_MEAN) * (gradient - self.mean)
        self.square += (1 - DECAY_SQUARE) * (gradient * gradient - self.square)
        mean = self.mean / (1 - DECAY_MEAN**self.steps)
        square = self.square / (1 - DECAY_SQUARE**self.steps)
        weights -= lr * mean / (np.sqrt(square) + EPSILON)

    def sqr_norm(self, gradient: Array) -> float:
        """Return the squared norm of a gradient preconditioned as in Adam's update."""
        scale = adam_preconditioner(self.square, self.steps, DECAY_SQUARE, EPSILON)
        seen = gradient / scale
        return float(np.dot(seen, seen))


class Sgd:
    """Plain stochastic gradient descent: each step is the gradient times the learning rate."""

    is_settled = True  # there is no preconditioner

    def __init__(self) -> None:
        self.steps = 0

    @property
    def arrays(self) -> Mapping[str, Array]:
        """Return nothing: the step count is the only state."""
        return {}

    def step(self, weights: Array, gradient: Array, lr: float) -> None:
        """Take one step downhill, in place."""
        self.steps += 1
        weights -= lr * gradient

    def sqr_norm(self, gradient: Array) -> float:
        """Return the squared norm of a gradient."""
        return float(np.dot(gradient, gradient))


def clip_by_norm(gradient: Array, max_norm: float) -> float:
    """Clip `gradient` in place to norm `max_norm` and return its norm before clipping."""
    norm = float(np.sqrt(np.dot(gradient, gradient)))
    if norm > max_norm:
        gradient *= max_norm / norm
    return norm
