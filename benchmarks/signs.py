"""How often the named signs are false alarms on noise that is alike from step to step, and what they find.

    python -m benchmarks.signs                200 runs per row (20 s)
    python -m benchmarks.signs --runs 50      fewer

A run has 500 steps; its noise is AR(1) without a trend, so that each sign is a false alarm. What should be
found: a mismatch that rises to ten times over 200 steps, from step 150, linearly or at a constant rate; a
reward that jumps by 0.3, or by six standard deviations of its noise if that is more; an evaluation that loses
0.15 while the reward, whose noise has a standard deviation of 0.05, gains 0.2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.suite import script_parser
from retrain.base.rollouts import Floats
from retrain.control.rules.signs import MismatchTrend
from retrain.results.report.signs import find_jump
from retrain.trainer.evaluation import Falling

STEPS = 500
STEP = np.arange(1, STEPS + 1)
EVERY = 20  # steps between two evaluations
QUESTIONS, SAMPLES = 50, 4


@dataclass(frozen=True)
class Row:
    """One sign in one kind of runs."""

    sign: str
    change: str  # what there is to find; empty if nothing
    autocorrelation: float
    deviation: float  # of the noise: in logs for a mismatch, in the reward's unit for the others
    named_percent: float  # of the runs


def noise(rng: np.random.Generator, autocorrelation: float, deviation: float) -> Floats:
    """Return an AR(1) series without a trend, shape (STEPS,)."""
    drawn = rng.normal(size=STEPS)
    for step in range(1, STEPS):
        drawn[step] = autocorrelation * drawn[step - 1] + np.sqrt(1 - autocorrelation**2) * drawn[step]
    return np.asarray(deviation * drawn)


def is_mismatch_named(logs: Floats) -> bool:
    trend = MismatchTrend()
    return any([trend.observe(float(kl), step) for step, kl in enumerate(0.01 * np.exp(logs), 1)])


def is_jump_named(reward: Floats) -> bool:
    held_out = np.where(STEP % EVERY == 0, 0.4, np.nan)
    return find_jump(STEP.tolist(), 0.5 + reward, held_out) is not None


def is_fall_named(rng: np.random.Generator, reward: Floats, level: Floats) -> bool:
    """Whether any evaluation of differing questions is named, at these means over all of them."""
    falling, easy = Falling(), rng.normal(0.0, 0.2, QUESTIONS)
    for step in range(1, STEPS + 1):
        falling.trained(float(0.5 + reward[step - 1]))
        if step % EVERY == 0:
            chance = np.clip(0.5 + level[step - 1] + easy, 0, 1)
            scores = rng.binomial(SAMPLES, chance) / SAMPLES
            falling.evaluated("held out", step, dict(enumerate(scores.tolist())), STEPS // EVERY)
            if falling.watch().falling:
                return True
    return False


Sign = Callable[[np.random.Generator, float, float], bool]  # of an autocorrelation and a deviation
RAMP = np.clip((STEP - 150) / 200, 0, 1)


def rise_of(rise: Floats) -> Sign:
    return lambda rng, rho, sd: is_mismatch_named(rise + noise(rng, rho, sd))


def jump_of(size: float) -> Sign:
    return lambda rng, rho, sd: is_jump_named(size * max(0.3, 6 * sd) * (STEP > 250) + noise(rng, rho, sd))


def fall_of(size: float) -> Sign:
    def named(rng: np.random.Generator, rho: float, sd: float) -> bool:
        reward = noise(rng, rho, 0.05) + (0.2 * RAMP if size else 0.0)
        return is_fall_named(rng, reward, noise(rng, rho, sd) - size * RAMP)

    return named


SIGNS: dict[tuple[str, str], tuple[Sign, tuple[float, ...]]] = {
    ("mismatch rose", ""): (rise_of(0 * RAMP), (0.3, 0.7, 1.2)),
    ("mismatch rose", "x10, linear"): (rise_of(np.log(1 + 9 * RAMP)), (0.1, 0.3, 0.5)),
    ("mismatch rose", "x10, constant rate"): (rise_of(RAMP * np.log(10)), (0.1, 0.3, 0.5)),
    ("reward jumps", ""): (jump_of(0), (0.02, 0.05, 0.1)),
    ("reward jumps", "+0.3 or more"): (jump_of(1), (0.02, 0.05, 0.1)),
    ("evaluation fell", ""): (fall_of(0), (0.0, 0.02, 0.05, 0.1)),
    ("evaluation fell", "-0.15"): (fall_of(0.15), (0.0, 0.02, 0.05, 0.1)),
}


def rows(runs: int) -> Iterator[Row]:
    def percent(named: Sign, rho: float, sd: float) -> float:
        seeds = ([run, int(100 * rho), int(1000 * sd)] for run in range(runs))
        return 100 * float(np.mean([named(np.random.default_rng(seed), rho, sd) for seed in seeds]))

    for (sign, change), (named, deviations) in SIGNS.items():
        for rho in (0.0, 0.5, 0.9):
            for sd in deviations:
                yield Row(sign, change, rho, sd, percent(named, rho, sd))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = list(rows(asked.runs))
    if asked.json:
        print(json.dumps([asdict(row) for row in found]))
        return
    print("sign              change               autocorrelation   sd   named in % of runs")
    for row in found:
        print(
            f"{row.sign:17s} {row.change:20s} {row.autocorrelation:15g} {row.deviation:5g} "
            f"{row.named_percent:10.1f}"
        )


if __name__ == "__main__":
    main()
