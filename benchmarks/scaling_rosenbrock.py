"""Plain SGD on Rosenbrock's valley with noisy gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from benchmarks.scaling_compare import GROWTH, Curve, Curves, continuations
from retrain.controllers.scaling import LearningRateScaling, ScalingRule
from retrain.rollouts import Floats

BATCH = 8  # of the small batch; each step's gradient is measured in 8 parts
CHANGE, MARK, MARKS = 4_992, BATCH * GROWTH, 540  # samples before the change and between scores; scores
LR = 8e-4  # at four times this some small-batch runs diverge
NOISE = 28.0  # deviation of a sample's gradient, per coordinate
LARGEST_LOSS = 1e6  # past this a run has diverged
TARGET = -math.log10(0.5)


def rosenbrock_curves(seeds: Iterable[int]) -> Curves:
    rules = continuations("none", "sqrt", "linear", "adascale")  # adamscale is for Adam
    return {name: [descend(rule, growth, seed) for seed in seeds] for name, (rule, growth) in rules.items()}


def descend(rule: ScalingRule, growth: int, seed: int) -> Curve:
    """Go downhill from (-1.2, 1.44); the batch grows after `CHANGE` samples."""
    rng, scaling, position = np.random.default_rng(seed), LearningRateScaling(rule, 8), np.array([-1.2, 1.44])
    scores: list[float] = []
    progress: list[float] = []
    factors: list[float] = []
    samples = 0
    while len(scores) < MARKS:
        batch = BATCH if samples < CHANGE else BATCH * growth
        decision = scaling.decide(batch)
        if loss(position) < LARGEST_LOSS:
            parts = gradient(position) + rng.normal(0, NOISE / math.sqrt(batch / 8), size=(8, 2))
            mean = parts.mean(axis=0)
            position = position - LR * decision.lr_factor * mean
            scaling.observe(decision, np.square(parts).sum(axis=1, keepdims=True), np.array([mean @ mean]))
        samples += batch
        if samples > CHANGE:
            factors.append(decision.lr_factor)
            if (samples - CHANGE) % MARK == 0:
                scores.append(-math.log10(min(loss(position), LARGEST_LOSS)))
                progress.append(decision.progress + decision.gain)
    return Curve(scores, progress, float(np.mean(factors)))


def loss(position: Floats) -> float:
    x, y = position
    return float((1 - x) ** 2 + 100 * (y - x * x) ** 2)


def gradient(position: Floats) -> Floats:
    x, y = position
    return np.array([-2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x)])
