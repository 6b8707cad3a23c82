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
from dataclasses import astuple, dataclass, fields, replace
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from retrain.config.prices import Price, price_of
from retrain.plan.estimate.workload import NORMAL_P90, run_variance
from retrain.records.decision import HELD_OUT
from retrain.records.layout import RunFiles
from retrain.records.lines import Row, is_count
from retrain.records.run_state import Done, read_start
from retrain.records.spending import Tokens, read_spending, tokens_of

if TYPE_CHECKING:
    from retrain.plan.estimate.wall_time import Learned, MatchedBy
    from retrain.plan.matrix import Plan

KINDS = tuple(kind.name for kind in fields(Tokens))
RUNS_DIFFER = 0.1  # standard deviation between runs over their mean, while no condition has two runs


@dataclass(frozen=True, slots=True)
class Billed:
    """Tokens of one run."""

    steps: tuple[Tokens, ...]  # usual ones, oldest first
    evaluations: Mapping[str, tuple[Tokens, ...]]  # of each time, by prefix of their columns
    rest: Tokens | None  # all but evaluations and `warm_up`; None if not known
    rest_steps: int  # usual steps in `rest`
    warm_up: Tokens | None = None  # all of `[warmup]`; None if it has none, or another run trained it

    def scaled(self, ratios: Mapping[str, float]) -> Billed:
        """Return what it would be with so many times as many tokens of these kinds in each step."""

        def scale(tokens: Tokens, by: Mapping[str, float]) -> Tokens:
            return replace(tokens, **{kind: round(by[kind] * getattr(tokens, kind)) for kind in by})

        steps = tuple(scale(step, ratios) for step in self.steps)
        if not steps or self.rest is None:
            return replace(self, steps=steps)
        more = sum(steps, Tokens()) - sum(self.steps, Tokens())
        more = scale(more, dict.fromkeys(ratios, self.rest_steps / len(steps)))
        return replace(self, steps=steps, rest=self.rest + more)


def billed_of(
    files: RunFiles,
    rows: Sequence[Row],
    updates: Sequence[Row],
    evaluations: Mapping[str, float],
    done: Done | None,
    ahead: int,
    *,
    was_asked_again: bool,
) -> Billed:
    """Read what a run was billed.

    Args:
        rows: its last.
        updates: the last of its warm-up.
        evaluations: the share of the last one's questions that are its own, by the prefix of its columns.
        done: how it ended.
        ahead: rollouts of up to so many steps were sampled before their own.
        was_asked_again: whether those with further questions were made with its own ones before.
    """
    start = dict(read_start(files).metrics)
    ending = rows[-1] if done is None else dict(done.result)  # which has the last row's evaluations
    evaluated = {name: tuple(_evaluated(name, (start, *rows[:-1], ending))) for name in evaluations}
    all_evaluated = sum(chain(*evaluated.values()), Tokens())
    for name, own_share in evaluations.items():
        if evaluated[name] and own_share < 1.0:
            *before, last = evaluated[name]
            own = Tokens(*(round(own_share * count) for count in astuple(last)))
            evaluated[name] = (*before, own)
            if was_asked_again:  # which the run had made before
                all_evaluated += own
    steps = tuple(_steps(rows, evaluations))
    steps = steps[ahead : len(steps) - (ahead + 1 if ahead and done else 0)] or steps
    warm_up = _warm_up(updates)
    count, spent = int(rows[-1]["step"]), read_spending(files)
    if done and spent and len(rows) == count and all(row["attempt"] == 1 for row in rows):
        rest = spent.tokens - all_evaluated - (warm_up or Tokens())
        return Billed(steps, evaluated, rest, count, warm_up)
    return Billed(steps, evaluated, None, 0, warm_up)


def _warm_up(rows: Sequence[Row]) -> Tokens | None:
    """Return the tokens of a whole warm-up, from its last rows; those of another run's have none."""
    if not (counted := [tokens for row in rows if (tokens := tokens_of(row))]):
        return None
    taken, updates = sum(counted, Tokens()), int(rows[-1]["step"])
    return Tokens(*(round(count * updates / len(counted)) for count in astuple(taken)))


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
    counts = Counter(run.condition for run in plan.runs)
    usd: dict[str, list[list[float]]] = {}  # of each condition, run and step
    prices: dict[str, Price] = {}
    for condition, run in plan.first_runs.items():
        price, billed = price_of(run.config), learned.conditions[condition].billed
        if price is None or not billed:
            return None
        prices[condition] = price
        usd[condition] = [[step.usd(price) for step in past.steps] for past in billed]
    measured = run_variance(usd.values())
    differ = math.sqrt(measured.variance) if measured.freedom else RUNS_DIFFER
    costs, variances = [], []
    for condition, price in prices.items():
        times, steps_usd = learned.conditions[condition], list(chain.from_iterable(usd[condition]))
        runs, steps = counts[condition], plan.first_runs[condition].max_steps
        mean = statistics.fmean(steps_usd)
        run_usd = steps * mean
        once = [
            past.rest.usd(price) - past.rest_steps * _mean_usd(past.steps, price)
            for past in times.billed
            if past.rest is not None and past.steps
        ]  # what belongs to no step or evaluation: rollouts that were sampled ahead
        if once:
            run_usd += statistics.fmean(once)
        at_start_usd, at_start = 0.0, plan.evaluations_at_start[condition]
        if warm_ups := [run.billed.warm_up for run in learned.history.runs if run.billed.warm_up]:
            at_start_usd += plan.warm_ups.get(condition, 0) * _mean_usd(warm_ups, price)
        for name, count in times.evaluations.items():
            if evaluated := [tokens for past in times.billed for tokens in past.evaluations.get(name, ())]:
                once_usd = _mean_usd(evaluated, price)
                run_usd += (count + learned.further.get(name, 0.0)) * once_usd
                at_start_usd += at_start.get(name.removeprefix(HELD_OUT).removesuffix("_"), 0) * once_usd
        of_steps, of_runs = statistics.pvariance(steps_usd), (differ * mean) ** 2
        to_come = runs * steps * of_steps + runs * steps**2 * of_runs
        so_far = (runs * steps) ** 2 * (of_steps / len(steps_usd) + of_runs / len(times.billed))
        variances.append(to_come + so_far)
        taken = [tokens for past in times.billed for tokens in past.steps]
        prefill, cached, sampled, trained = (
            statistics.fmean(getattr(tokens, kind) for tokens in taken) for kind in KINDS
        )
        p50_usd = runs * run_usd + at_start_usd
        p90_usd = p50_usd + NORMAL_P90 * math.sqrt(to_come + so_far)
        match = times.match
        costs.append(
            ConditionCost(condition, match, prefill, cached, sampled, trained, run_usd, p50_usd, p90_usd)
        )
    total = math.fsum(cost.p50_usd for cost in costs)
    return CostForecast(total, total + NORMAL_P90 * math.sqrt(math.fsum(variances)), tuple(costs))


def _mean_usd(taken: Sequence[Tokens], price: Price) -> float:
    return statistics.fmean(tokens.usd(price) for tokens in taken)
