"""Worlds in which to compare batch controllers: true throughput by step and batch size, noise and limits.

A world has batch sizes b = 1..64 in groups of 8, so concurrency p = 8 b, and 300 steps. Its curves are the
Universal Scalability Law written as a step time, T(b) = lead + load b + crowd b^2, or another shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
STEPS = 300
SIZES: Array = np.arange(1, 65, dtype=float)
GROUP = 8
NOISES = (0.02, 0.10, 0.20)
PEAK = 10_000.0  # tokens per second of the best size in a USL world


@dataclass(frozen=True)
class World:
    """One world: what every size would do at every step, and what is measured.

    Attributes:
        name: the scenario.
        noise: standard deviation of the log of the measurement factor.
        throughput: shape (steps, sizes), tokens per second, free of noise.
        factor: shape (steps,), what a measurement is multiplied by (noise and stalls).
        memory_limit: the smallest batch that runs out of memory, 65 if none does.
        telemetry: whether the controller sees the memory fraction.
    """

    name: str
    noise: float
    throughput: Array
    factor: Array
    memory_limit: int = 65
    telemetry: bool = False

    def memory_fraction(self, batch: int, step: int) -> float:
        """Used share of memory: a quarter for weights, a part linear in the batch, and 1 % of wobble."""
        wobble = 0.01 * np.sin(12.9898 * step)
        return float(0.25 + 0.75 * batch / self.memory_limit + wobble)


def usl(best: float, flatness: float, sizes: Array = SIZES) -> Array:
    """Throughput of a USL curve with its optimum at `best`; a flat top for a large `flatness`."""
    return PEAK * (2.0 + flatness) / (best / sizes + sizes / best + flatness)


def contended(best: float, load: float, sizes: Array = SIZES) -> Array:
    """USL with a fixed lead and load, so that moving the optimum changes the crowding (kappa) only."""
    return PEAK / (1.0 / sizes + load + sizes / best**2) * 0.2


def saturating(load: float = 0.05) -> Array:
    return PEAK * load / (1.0 / SIZES + load)


def staircase(best: float = 48.0, tile: int = 8) -> Array:
    """Step time rises once per `tile` of the batch, as padded kernels do."""
    padded = np.ceil(SIZES / tile) * tile
    return np.asarray(usl(best, 2.0, padded) * SIZES / padded, dtype=np.float64)


def still(curve: Array) -> Array:
    return np.tile(curve, (STEPS, 1))


def stepped(before: Array, after: Array, at: int = 150) -> Array:
    return np.where(np.arange(STEPS)[:, None] < at, before, after)


def drifting(first: float, last: float, curve: Callable[[float], Array]) -> Array:
    return np.stack([curve(float(best)) for best in np.geomspace(first, last, STEPS)])


def noise_factor(rng: np.random.Generator, noise: float, stall_fraction: float = 0.0) -> Array:
    """Log-normal noise; a stalled step takes 3 to 10 times as long."""
    factor: Array = np.exp(rng.normal(0.0, noise, STEPS))
    stalled = rng.random(STEPS) < stall_fraction
    return np.where(stalled, factor / rng.uniform(3.0, 10.0, STEPS), factor)


def _curves() -> dict[str, Array]:
    return {
        "interior 16": still(usl(16, 1.0)),
        "interior 32": still(usl(32, 1.0)),
        "early 3": still(usl(3, 1.0)),
        "late 90": still(usl(90, 1.0)),
        "saturating": still(saturating()),
        "linear": still(PEAK * SIZES / 64),
        "out of memory": still(usl(90, 1.0)),
        "step 32 to 8": stepped(contended(32, 0.02), contended(8, 0.02)),
        "step 8 to 32": stepped(contended(8, 0.02), contended(32, 0.02)),
        "drift 40 to 10": drifting(40, 10, lambda best: contended(best, 0.02)),
        "stalls": still(usl(24, 1.0)),
        "roofline plateau": still(PEAK * np.minimum(SIZES / 20, 1.0)),
        "staircase": still(staircase()),
    }


NAMED = tuple(_curves())
STATIONARY = tuple(name for name in NAMED if not name.startswith(("step", "drift", "out of")))


def named_worlds(seeds: int, *, telemetry: bool = False) -> Iterator[World]:
    """Every scenario at every noise level and seed, in a fixed order."""
    for index, (name, curve) in enumerate(_curves().items()):
        for noise in NOISES:
            for seed in range(seeds):
                rng = np.random.default_rng([index, int(noise * 1000), seed])
                factor = noise_factor(rng, noise, 0.06 if name == "stalls" else 0.0)
                limit = int(rng.integers(18, 41)) if name == "out of memory" else 65
                yield World(name, noise, curve, factor, limit, telemetry)


def _random_usl(rng: np.random.Generator) -> Array:
    return usl(float(np.exp(rng.uniform(np.log(2), np.log(128)))), float(np.exp(rng.uniform(-3, 2))))


def _random_change(rng: np.random.Generator) -> Array:
    """The optimum jumps, and the machine gets up to 30 % faster or slower."""
    after = _random_usl(rng) * rng.uniform(0.7, 1.3)
    return stepped(_random_usl(rng), after, int(rng.integers(60, 240)))


def _random_contention(rng: np.random.Generator) -> Array:
    """Only the crowding changes: small sizes barely notice."""
    before, after = np.exp(rng.uniform(np.log(2), np.log(100), 2))
    load = float(rng.uniform(0.005, 0.1))
    return stepped(contended(before, load), contended(after, load), int(rng.integers(60, 240)))


def _random_drift(rng: np.random.Generator) -> Array:
    first, last = np.exp(rng.uniform(np.log(3), np.log(100), 2))
    flatness = float(np.exp(rng.uniform(-3, 2)))
    return drifting(first, last, lambda best: usl(best, flatness))


def _random_shape(rng: np.random.Generator) -> Array:
    if rng.random() < 0.5:
        return still(PEAK * np.minimum(SIZES / rng.uniform(4, 64), 1.0))
    return still(staircase(float(rng.uniform(16, 80)), int(rng.choice([4, 8, 16]))))


def random_world(rng: np.random.Generator) -> World:
    """A world of a random kind: 4 in 10 stay still, the rest change, stall, lack memory or are no USL."""
    noise = float(np.exp(rng.uniform(np.log(0.02), np.log(0.2))))
    kind = rng.random()
    factor = noise_factor(rng, noise, 0.06 if 0.4 <= kind < 0.5 else 0.0)
    if kind < 0.5:
        return World("random: still", noise, still(_random_usl(rng)), factor)
    if kind < 0.6:
        return World("random: memory", noise, still(_random_usl(rng)), factor, int(rng.integers(6, 60)))
    if kind < 0.7:
        return World("random: jump", noise, _random_change(rng), factor)
    if kind < 0.8:
        return World("random: contention", noise, _random_contention(rng), factor)
    if kind < 0.9:
        return World("random: drift", noise, _random_drift(rng), factor)
    return World("random: shape", noise, _random_shape(rng), factor)


def random_worlds(count: int, seed: int) -> Iterator[World]:
    for index in range(count):
        yield random_world(np.random.default_rng([seed, index]))


def late_jumps(seeds: int, first_seed: int = 0) -> Iterator[World]:
    """The hardest change: from a small optimum to a very large one after 200 steps, in strong noise."""
    curves: list[Callable[[float], Array]] = [
        lambda best: contended(best, 0.02),
        lambda best: contended(best, 0.1),
        lambda best: usl(best, 1.0),
        lambda best: usl(best, 6.0),
    ]
    for index, curve in enumerate(curves):
        for first, last in ((3.0, 60.0), (6.0, 100.0)):
            jump = stepped(curve(first), curve(last), 200)
            for noise in (0.12, 0.20):
                for seed in range(first_seed, first_seed + seeds):
                    factor = noise_factor(np.random.default_rng([index, seed]), noise)
                    yield World("late jump", noise, jump, factor)


def _hard_noise(rng: np.random.Generator) -> tuple[float, Array]:
    """Noise that is stronger, heavy-tailed or in bursts; at times a tenth of the steps stalls."""
    noise = float(np.exp(rng.uniform(np.log(0.02), np.log(0.3))))
    kind = rng.random()
    drawn: Array = rng.normal(0.0, 1.0, STEPS)
    if kind < 0.3:
        drawn = rng.standard_t(3, STEPS) / np.sqrt(3.0)
    elif kind < 0.5:  # each step's is half the one before's
        for step in range(1, STEPS):
            drawn[step] = 0.5 * drawn[step - 1] + np.sqrt(0.75) * drawn[step]
    factor: Array = np.exp(noise * drawn)
    stalled = rng.random(STEPS) < (rng.uniform(0.02, 0.1) if rng.random() < 0.3 else 0.0)
    return noise, np.where(stalled, factor / rng.uniform(3.0, 30.0, STEPS), factor)


def _hard_curve(rng: np.random.Generator) -> Array:
    """The best size may lie at four times the largest, or among the smallest ones; sharp or flat."""
    return usl(float(np.exp(rng.uniform(np.log(1.5), np.log(256)))), float(np.exp(rng.uniform(-4, 3))))


def hard_world(rng: np.random.Generator) -> World:
    """A world harder than `random_world`'s: other noise, later peaks, heavier stalls, less memory."""
    noise, factor = _hard_noise(rng)
    kind = rng.random()
    if kind < 0.35:
        return World("hard: still", noise, still(_hard_curve(rng)), factor)
    if kind < 0.55:
        return World("hard: memory", noise, still(_hard_curve(rng)), factor, int(rng.integers(3, 64)))
    if kind < 0.7:
        after = _hard_curve(rng) * rng.uniform(0.5, 2.0)
        return World(
            "hard: jump", noise, stepped(_hard_curve(rng), after, int(rng.integers(40, 260))), factor
        )
    if kind < 0.8:
        return World("hard: contention", noise, _random_contention(rng), factor)
    if kind < 0.9:
        return World("hard: drift", noise, _random_drift(rng), factor)
    return World("hard: shape", noise, _random_shape(rng), factor)


def hard_worlds(count: int, seed: int) -> Iterator[World]:
    for index in range(count):
        yield hard_world(np.random.default_rng([seed, index, 7]))
