"""How far a scaled large-batch run falls behind the small-batch run at equal samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules.scaling import RULES, ScalingRule

GROWTH = 8
SMALL = "small"
CLEAR = 2.0  # standard errors of a difference beyond which two rules count as told apart
WINDOW = 5  # scores averaged before a level counts as reached


def continuations(*names: str) -> dict[str, tuple[ScalingRule, int]]:
    """Return each way to go on after the change: a rule and the batch's growth."""
    return {SMALL: (RULES["none"](), 1)} | {name: (RULES[name](), GROWTH) for name in names}


@dataclass(frozen=True)
class Curve:
    """What one run scored after the change, at equal distances in samples; higher is better."""

    scores: Sequence[float]
    lr_factor: float  # mean over steps


Curves = Mapping[str, Sequence[Curve]]  # of each rule, a curve for each seed


@dataclass(frozen=True)
class Estimate:
    mean: float
    error: float  # standard error over seeds

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}"


@dataclass(frozen=True)
class Row:
    problem: str
    rule: str
    quarters: tuple[Estimate, ...]  # mean score in each quarter of the samples after the change
    gap: Estimate  # the last quarter's to that of "small" with the same seed
    whole_gap: Estimate  # that of all samples after the change
    lr_factor: float


def compare(problem: str, curves: Curves) -> list[Row]:
    return [
        Row(
            problem,
            rule,
            tuple(estimate(quarter) for quarter in quarters(runs).T),
            last_gap(curves, rule, SMALL),
            estimate((quarters(runs) - quarters(curves[SMALL])).mean(axis=1)),
            float(np.mean([run.lr_factor for run in runs])),
        )
        for rule, runs in curves.items()
    ]


def verdicts(problem: str, curves: Curves, rule: str, margin: float) -> list[str]:
    """Return whether `rule` stays with "small", and the unscaled and the linear learning rate do not."""
    lines = []
    for name in (rule, "none", "linear"):
        gap = last_gap(curves, name, SMALL)
        stays = "stays" if gap.mean >= -margin else "does not stay"
        lines.append(f"{problem}: {name} {stays} within {margin} of small in the last quarter ({gap})")
    for rival in ("none", "linear"):
        lead = last_gap(curves, rule, rival)
        sign = "yes" if lead.mean > CLEAR * lead.error else "no"
        sign = "the reverse" if lead.mean < -CLEAR * lead.error else sign
        lines.append(f"{problem}: {rule} above {rival} by over {CLEAR:g} standard errors: {sign} ({lead})")
    return lines


def cost(problem: str, curves: Curves, rule: str) -> str:
    """Compare the samples to nine tenths of what "small" rises from the change to its last quarter.

    On curves averaged over seeds, as a single run's wander.
    """
    small, scaled = smooth(curves[SMALL]), smooth(curves[rule])
    level = small[0] + 0.9 * (quarters(curves[SMALL])[:, -1].mean() - small[0])
    ratio = marks_to(scaled, level) / marks_to(small, level)
    needs = f"needs x{ratio:.2f} the samples for" if np.isfinite(ratio) else "does not reach"
    return f"{problem}: {rule} {needs} 0.9 of small's rise"


def marks_to(scores: Floats, level: float) -> float:
    reached = np.flatnonzero(scores >= level)
    return float(reached[0] + WINDOW) if reached.size else float("inf")


def smooth(runs: Sequence[Curve]) -> Floats:
    mean = np.mean([run.scores for run in runs], axis=0)
    return np.convolve(mean, np.full(WINDOW, 1 / WINDOW), mode="valid")


def last_gap(curves: Curves, rule: str, other: str) -> Estimate:
    return estimate(quarters(curves[rule])[:, -1] - quarters(curves[other])[:, -1])


def quarters(runs: Sequence[Curve]) -> Floats:
    """Return the mean score of each run in each quarter: shape (runs, 4)."""
    return np.array([[part.mean() for part in np.array_split(np.array(run.scores), 4)] for run in runs])


def estimate(values: Floats) -> Estimate:
    return Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))))
