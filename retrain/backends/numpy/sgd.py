"""Plain stochastic gradient descent: every step is the gradient times the learning rate."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from retrain.backends.numpy.weights import Array


class Sgd:
    """Keeps nothing but the number of steps taken."""

    is_settled = True  # gradients are compared as they are

    def __init__(self) -> None:
        self.steps = 0

    @property
    def arrays(self) -> Mapping[str, Array]:
        """Nothing to save."""
        return {}

    def step(self, weights: Array, gradient: Array, lr: float) -> None:
        """Move `weights` in place, downhill."""
        self.steps += 1
        weights -= lr * gradient

    def sqr_norm(self, gradient: Array) -> float:
        """Squared norm of a gradient."""
        return float(np.dot(gradient, gradient))
