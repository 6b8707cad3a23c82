"""Plain SGD on Rosenbrock's valley with noisy gradients; a fifth of the way the batch grows eightfold.

The learning rate is small enough that noise dominates along the valley, where eight small steps may
become nearly one, and large enough that eight times as much cannot come to rest at the optimum: its
stiff direction has a curvature of 1002, and 8 x 3e-4 x 1002 is above 2.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.studies.scaling_compare import Curve, continuations
from retrain.base.rollouts import Floats
from retrain.control.rules.scaling import LearningRateScaling, ScalingRule

BATCH, PARTS = 8, 8  # samples of the small batch; each step's gradient is measured in 8 parts
CHANGE, MARK, MARKS = 60_032, 640, 375  # samples before the change and between scores; scores
LR = 3e-4
NOISE = 28.0  # deviation of a sample's gradient, per coordinate
LARGEST_LOSS = 1e6  # past this a run has diverged
RULES = ("none", "sqrt", "linear", "adascale")  # adamscale is for Adam


def rosenbrock_curves(seed: int) -> dict[str, Curve]:
    """Return each rule's curve."""
    return {name: descend(rule, growth, seed) for name, (rule, growth) in continuations(*RULES).items()}


def descend(rule: ScalingRule, growth: int, seed: int) -> Curve:
    """Go downhill from (-1.2, 1.44); the batch grows after `CHANGE` samples."""
    rng, scaling, position = (
        np.random.default_rng(seed),
        LearningRateScaling(rule, BATCH),
        np.array([-1.2, 1.44]),
    )
    scores: list[float] = []
    factors: list[float] = []
    samples = 0
    while len(scores) < MARKS:
        batch = BATCH if samples < CHANGE else BATCH * growth
        decision = scaling.decide(batch)
        if loss(position) < LARGEST_LOSS:
            parts = gradient(position) + rng.normal(0, NOISE / math.sqrt(batch / PARTS), size=(PARTS, 2))
            mean = parts.mean(axis=0)
            position = position - LR * decision.lr_factor * mean
            scaling.observe(decision, np.square(parts).sum(axis=1, keepdims=True), np.array([mean @ mean]))
        samples += batch
        if samples > CHANGE:
            factors.append(decision.lr_factor)
            if (samples - CHANGE) % MARK == 0:
                scores.append(-math.log10(min(loss(position), LARGEST_LOSS)))
    return Curve(scores, float(np.mean(factors)))


def loss(position: Floats) -> float:
    x, y = position
    return float((1 - x) ** 2 + 100 * (y - x * x) ** 2)


def gradient(position: Floats) -> Floats:
    x, y = position
    return np.array([-2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x)])
