"""How far a scaled large-batch run falls behind the small-batch run at equal samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.controllers.scaling import RULES, ScalingRule
from retrain.rollouts import Floats

GROWTH = 8
SMALL = "small"
CLEAR = 2.0  # standard errors of a difference beyond which two rules count as told apart


def continuations(*names: str) -> dict[str, tuple[ScalingRule, int]]:
    """Give each way to go on after the change: a rule and the batch's growth."""
    return {SMALL: (RULES["none"](), 1)} | {name: (RULES[name](), GROWTH) for name in names}


@dataclass(frozen=True)
class Curve:
    """What one run scored after the change, at equal distances in samples; higher is better."""

    scores: Sequence[float]
    progress: Sequence[float]  # small-batch steps that the run was worth by then
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
    lr_factor: float


def compare(problem: str, curves: Curves) -> list[Row]:
    return [
        Row(
            problem,
            rule,
            tuple(estimate(quarter) for quarter in quarters(runs).T),
            last_gap(curves, rule, SMALL),
            float(np.mean([run.lr_factor for run in runs])),
        )
        for rule, runs in curves.items()
    ]


def verdicts(problem: str, curves: Curves, rule: str, margin: float) -> list[str]:
    """Say whether `rule` stays with "small" and beats the unscaled and the linear learning rate."""
    gap = last_gap(curves, rule, SMALL)
    stays = "yes" if gap.mean >= -margin else "no"
    lines = [f"{problem}: {rule} within {margin} of small in the last quarter: {stays} ({gap})"]
    for rival in ("none", "linear"):
        lead = last_gap(curves, rule, rival)
        sign = "yes" if lead.mean > CLEAR * lead.error else "no"
        sign = "the reverse" if lead.mean < -CLEAR * lead.error else sign
        lines.append(f"{problem}: {rule} above {rival} by over {CLEAR:g} standard errors: {sign} ({lead})")
    return lines


def progress_verdict(problem: str, curves: Curves, rule: str, target: float) -> str:
    """Compare what AdaScale promises to keep: the score at equal progress."""
    small, scaled = (
        np.median([first_progress(run, target) for run in curves[name]]) for name in (SMALL, rule)
    )
    return (
        f"{problem}: median progress to a score of {target:.2g}: small {small:.0f} steps, "
        f"{rule} {scaled:.0f} ({scaled / small - 1:+.0%})"
    )


def first_progress(run: Curve, target: float) -> float:
    reached = (p for p, s in zip(run.progress, run.scores, strict=True) if s >= target)
    return next(reached, float("inf"))


def last_gap(curves: Curves, rule: str, other: str) -> Estimate:
    return estimate(quarters(curves[rule])[:, -1] - quarters(curves[other])[:, -1])


def quarters(runs: Sequence[Curve]) -> Floats:
    """Give the mean score of each run in each quarter: shape (runs, 4)."""
    return np.array([[part.mean() for part in np.array_split(np.array(run.scores), 4)] for run in runs])


def estimate(values: Floats) -> Estimate:
    return Estimate(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))))
