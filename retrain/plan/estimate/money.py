"""What runs were billed, from their records, and what a plan will cost at the prices of today.

The tokens of a step vary, and runs of a condition differ beyond that. Both are normal here: P90 is the mean
and 1.28 standard deviations, of what is still to be drawn and of what was measured. What no earlier run has
met, such as completions that grow longer later, is not in it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from retrain.config.prices import Price, price_of
from retrain.plan.estimate.workload import NORMAL_P90, run_variance
from retrain.records.layout import RunFiles
from retrain.records.lines import Row, is_count
from retrain.records.metrics import read_ends
from retrain.records.run_state import Done
from retrain.records.spending import Tokens, read_spending, tokens_of

if TYPE_CHECKING:
    from retrain.plan.estimate.learned import ConditionTimes, Learned, MatchedBy
    from retrain.plan.matrix import Plan

KINDS = tuple(kind.name for kind in fields(Tokens))
RUNS_DIFFER = 0.1  # standard deviation between runs over their mean, while no condition has two runs


@dataclass(frozen=True, slots=True)
class Billed:
    """Tokens of one run."""

    steps: tuple[Tokens, ...]  # usual ones, oldest first
    evaluations: Mapping[str, tuple[Tokens, ...]]  # of each time, by prefix of their columns
    rest: Tokens | None  # all but evaluations, or a part of it without steps; None if not known
    rest_steps: int  # usual steps in `rest`

    def with_passes(self, ratio: float) -> Billed:
        """Return what it would be with so many times as many passes over each batch."""
        steps = tuple(replace(step, train=round(ratio * step.train)) for step in self.steps)
        if not steps or self.rest is None:
            return replace(self, steps=steps)
        more = sum(steps, Tokens()) - sum(self.steps, Tokens())
        more = replace(more, train=round(self.rest_steps * more.train / len(steps)))
        return replace(self, steps=steps, rest=self.rest + more)


def billed_of(
    files: RunFiles, rows: Sequence[Row], evaluations: Collection[str], done: Done | None, ahead: int
) -> Billed:
    """Read what a run was billed; `rows` are its last, `evaluations` the prefixes of their columns.

    Rollouts of up to `ahead` steps were sampled before their own.
    """
    ending = rows[-1] if done is None else dict(done.result)  # which has the last row's evaluations
    evaluated = {name: tuple(_evaluated(name, (*rows[:-1], ending))) for name in evaluations}
    steps = tuple(_steps(rows, evaluations))
    steps = steps[ahead : len(steps) - (ahead + 1 if ahead and done else 0)] or steps
    if done is None:
        return Billed(steps, evaluated, None, 0)
    count, spent = int(rows[-1]["step"]), read_spending(files)
    if spent and len(rows) == count and all(row["attempt"] == 1 for row in rows):
        return Billed(steps, evaluated, spent.tokens - sum(chain(*evaluated.values()), Tokens()), count)
    warm_up = read_ends(files.warmup, len(rows)).last
    return Billed(steps, evaluated, sum(filter(None, map(tokens_of, warm_up)), Tokens()), 0)


def _steps(rows: Sequence[Row], evaluations: Collection[str]) -> Iterator[Tokens]:
    """Iterate over the tokens of all steps but each attempt's first, in which others may be sampled ahead.

    Likewise the caller leaves out those after it, and a run's last ones, for which nothing is left to sample.
    """
    for before, row in pairwise(rows):
        if before["attempt"] == row["attempt"] and (tokens := tokens_of(row)) is not None:
            counted_before = chain.from_iterable(_evaluated(name, (before,)) for name in evaluations)
            yield tokens - sum(counted_before, Tokens())  # a row counts the evaluations after the row before


def _evaluated(name: str, rows: Iterable[Row]) -> Iterator[Tokens]:
    """Iterate over an evaluation's tokens, each time."""
    for row in rows:
        cells = ((kind, row.get(f"{name}billed_{kind}")) for kind in KINDS)
        if counts := {kind: count for kind, count in cells if is_count(count)}:
            yield Tokens(**counts)


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
    costs, variances = [], []
    runs = Counter(run.condition for run in plan.runs)
    prices = {condition: price_of(run.config) for condition, run in plan.first_runs.items()}
    between_runs = run_variance(
        [[step.usd(price) for step in billed.steps] for billed in learned.conditions[condition].billed]
        for condition, price in prices.items()
        if price is not None
    )
    differ = math.sqrt(between_runs.variance) if between_runs.freedom else RUNS_DIFFER
    for condition, run in plan.first_runs.items():
        measured, price = learned.conditions[condition], prices[condition]
        if price is None or not measured.billed:
            return None
        cost, variance = _of_condition(measured, price, runs[condition], run.max_steps, differ)
        costs.append(cost)
        variances.append(variance)
    total = math.fsum(cost.p50_usd for cost in costs)
    return CostForecast(total, total + NORMAL_P90 * math.sqrt(math.fsum(variances)), tuple(costs))


def _of_condition(
    measured: ConditionTimes, price: Price, runs: int, steps: int, differ: float
) -> tuple[ConditionCost, float]:
    """Return a condition's cost, and the variance of all of its runs'."""
    taken = [tokens for run in measured.billed for tokens in run.steps]
    usd = [tokens.usd(price) for tokens in taken]
    mean = statistics.fmean(usd)
    run_usd = steps * mean
    once = [
        run.rest.usd(price) - run.rest_steps * _mean_usd(run.steps, price)
        for run in measured.billed
        if run.rest is not None and run.steps
    ]  # what belongs to no step or evaluation: the warm-up, rollouts that were sampled ahead
    if once:
        run_usd += statistics.fmean(once)
    for name, count in measured.evaluations.items():
        if evaluated := [tokens for run in measured.billed for tokens in run.evaluations.get(name, ())]:
            run_usd += count * _mean_usd(evaluated, price)
    of_steps, of_runs = statistics.pvariance(usd), (differ * mean) ** 2
    to_come = runs * steps * of_steps + runs * steps**2 * of_runs
    so_far = (runs * steps) ** 2 * (of_steps / len(usd) + of_runs / len(measured.billed))
    prefill, cached, sampled, trained = (
        statistics.fmean(getattr(step, kind) for step in taken) for kind in KINDS
    )
    p90_usd = runs * run_usd + NORMAL_P90 * math.sqrt(to_come + so_far)
    name, match, p50_usd = measured.condition, measured.match, runs * run_usd
    cost = ConditionCost(name, match, prefill, cached, sampled, trained, run_usd, p50_usd, p90_usd)
    return cost, to_come + so_far


def _mean_usd(taken: Sequence[Tokens], price: Price) -> float:
    return statistics.fmean(tokens.usd(price) for tokens in taken)
