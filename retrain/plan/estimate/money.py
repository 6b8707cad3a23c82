"""What a plan will cost, from the tokens of earlier runs and the prices of today.

The tokens of a step vary, and runs of a condition differ beyond that. Both are normal here: P90 is the mean
and 1.28 standard deviations, of what is still to be drawn and of what was measured. What no earlier run has
met, such as completions that grow longer later, is not in it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from retrain.config.prices import Price, price_of
from retrain.plan.estimate.billed import mean_usd
from retrain.plan.estimate.learned import Learned, MatchedBy, Measured
from retrain.plan.matrix import Plan
from retrain.records.spending import Tokens

Z90 = 1.2816  # of the normal distribution
RUNS_DIFFER = 0.1  # standard deviation between runs over their mean, while no condition has two runs


@dataclass(frozen=True)
class ConditionCost:
    """What the runs of a condition will cost."""

    condition: str
    match: MatchedBy  # the earlier runs that it is estimated from
    prefill_tokens: float  # of a step, on average
    cached_tokens: float
    sampled_tokens: float
    trained_tokens: float
    run_usd: float  # one run
    p50_usd: float  # all runs
    p90_usd: float


@dataclass(frozen=True)
class CostForecast:
    """What a campaign will cost, if all of its runs are made."""

    p50_usd: float
    p90_usd: float
    conditions: tuple[ConditionCost, ...]


def cost_forecast(plan: Plan, learned: Learned) -> CostForecast | None:
    """Return what a plan will cost; None if a price, or the tokens of a condition's steps, are not known."""
    found, variances = [], []
    differ = _runs_differ(plan, learned)
    for condition, run in plan.first_runs().items():
        measured, price = learned.conditions[condition], price_of(run.config)
        if price is None or not measured.billed:
            return None
        runs = sum(one.condition == condition for one in plan.runs)
        cost, variance = _of_condition(measured, price, runs, run.max_steps, differ)
        found.append(cost)
        variances.append(variance)
    total = math.fsum(one.p50_usd for one in found)
    return CostForecast(total, total + Z90 * math.sqrt(math.fsum(variances)), tuple(found))


def _of_condition(
    measured: Measured, price: Price, runs: int, steps: int, differ: float
) -> tuple[ConditionCost, float]:
    """Return a condition's cost, and the variance of all of its runs'."""
    taken = [tokens for run in measured.billed for tokens in run.steps]
    usd = _usd(taken, price)
    mean = statistics.fmean(usd)
    run_usd = steps * mean + _beside_usd(measured, price)
    of_steps, of_runs = statistics.pvariance(usd), (differ * mean) ** 2
    to_come = runs * steps * of_steps + runs * steps**2 * of_runs
    measured_so_far = (runs * steps) ** 2 * (of_steps / len(usd) + of_runs / len(measured.billed))
    variance = to_come + measured_so_far
    prefill, cached, sampled, trained = (
        statistics.fmean(getattr(one, kind) for one in taken)
        for kind in ("prefill", "cached", "sample", "train")
    )
    p50_usd = runs * run_usd
    p90_usd = p50_usd + Z90 * math.sqrt(variance)
    name, match = measured.condition, measured.match
    found = ConditionCost(name, match, prefill, cached, sampled, trained, run_usd, p50_usd, p90_usd)
    return found, variance


def _runs_differ(plan: Plan, learned: Learned) -> float:
    """Return how much a condition's runs differ beyond what their steps explain, relative to their mean."""
    squares, freedom, explained = 0.0, 0, 0.0
    for condition, run in plan.first_runs().items():
        price, runs = price_of(run.config), learned.conditions[condition].billed
        if price is None or len(runs) < 2:
            continue
        means = [mean_usd(one.steps, price) for one in runs]
        if middle := statistics.fmean(means):
            squares += math.fsum((mean / middle - 1) ** 2 for mean in means)
            freedom += len(means) - 1
            by_steps = (statistics.pvariance(_usd(one.steps, price)) / len(one.steps) for one in runs)
            explained += (len(means) - 1) * statistics.fmean(by_steps) / middle**2
    return math.sqrt(max(0.0, squares - explained) / freedom) if freedom else RUNS_DIFFER


def _usd(taken: Sequence[Tokens], price: Price) -> list[float]:
    return [tokens.usd(price) for tokens in taken]


def _beside_usd(measured: Measured, price: Price) -> float:
    """Return what a run costs beside its steps: its evaluations, and what it takes once."""
    once = [usd for run in measured.billed if (usd := run.once_usd(price)) is not None]
    beside = statistics.fmean(once) if once else 0.0
    for name, count in measured.evaluations.items():
        taken = [tokens for run in measured.billed for tokens in run.evaluations.get(name, ())]
        beside += count * mean_usd(taken, price) if taken else 0.0
    return beside
