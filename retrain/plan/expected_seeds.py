"""How many seeds a campaign with `[decision]` is expected to need: simulated, for differences that may be.

The differences of pairs are drawn from a normal distribution, with the spread of the paired differences in
earlier campaigns, and their correlations between rungs; at an early rung they are as much smaller as less
had been learned there. While that is unknown, differences are told in units of the spread, and are the same
at each rung. Campaigns go through the rounds that real ones would, with either `allocate`, until the budget
is used up; all steps count as equally costly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from retrain.base.rollouts import Floats
from retrain.config.schema import DecisionSection
from retrain.plan.decidable import FOUND, comparison_of
from retrain.plan.decision import Walk
from retrain.plan.matrix import Plan, RunPlan
from retrain.plan.past import drawn_differences, past_if_any, spread_of
from retrain.plan.search import fresh_plan
from retrain.records.decision import value_key
from retrain.records.text import about, count_of, dollars, parse_duration
from retrain.records.windows import AXES, STEPS, read_window

SIMULATED = 200  # comparisons per difference: shares to within 7 points, in half a second
FEWEST_SIMULATED = 40  # campaigns, up to so many conditions:
CROWDED = 10  # from here on there are fewer: the time of a campaign grows with their square


@dataclass(frozen=True)
class ExpectedSeeds:
    """What a campaign needs if every condition differs this much from the reference."""

    difference: float
    unit: str  # the metric, or "SD": the standard deviation of a paired difference
    seeds: float  # of a condition, on average
    found: float  # share of conditions whose difference is found
    runs: float  # of the whole campaign, on average
    time_s: float | None  # about as long as these runs take; null while no step time is known
    steps: float  # of these runs
    cost_usd: float | None  # of these runs; null where it is not known
    simulated: int  # campaigns


@dataclass(frozen=True)
class Most:
    """The runs of a campaign that takes as many as it may, and what these take."""

    plan: Plan
    time_s: float | None = None
    cost_usd: float | None = None


def expected_seeds(most: Most, table: DecisionSection, logs: Path) -> tuple[ExpectedSeeds, ...]:
    """Return what is expected without a difference, with the smallest that matters, and with twice that.

    Without a smallest difference, or while the spread is unknown, these are 0, 1 and 2 SD. Of a search, the
    winner differs so much from the reference, unless that is the winner: then it takes the search alone.
    """
    window, smallest = read_window(table.per, table.over), table.smallest_difference
    windows = [replace(window, end=rung) for rung in table.rungs] or [window]
    past = past_if_any(logs, most.plan, table.metric)
    residuals, freedom = past.residuals(windows)
    spread, shares = spread_of(residuals), np.array([*past.shares(windows[:-1], windows[-1]), 1.0])
    if not spread:
        smallest, spread, shares = None, 1.0, np.ones(len(windows))
        residuals, freedom = np.ones((1, len(windows))), math.inf
    unit, step = ("SD", 1.0) if smallest is None else (table.metric, smallest)
    table, size = replace(table, smallest_difference=smallest), spread if smallest is None else smallest

    def expected(times: int) -> ExpectedSeeds:
        def drawn(shape: tuple[int, int, int]) -> Floats:
            noise = drawn_differences(residuals, freedom, shape, np.random.default_rng(0))
            return noise + times * size * shares

        return _expected(most, table, times * step, unit, drawn)

    return tuple(map(expected, (0, 1, 2)))


def ends_too_early(most: Most, table: DecisionSection) -> str:
    """Return why a budget ends before there can be a verdict; "" if it does not, or no cost is known.

    What is counted is the least that a verdict takes: a whole search before its fresh seeds; with
    `allocate = "auto"`, after the first seeds those of one condition and the reference. Where runs end at an
    amount of seconds or dollars, that is what each takes at least.
    """
    plan = most.plan
    others = [name for name in plan.conditions if name != plan.reference]
    deciding = fresh_plan(plan, others[0]) if plan.search_seeds else plan
    is_auto, conditions = table.allocate == "auto", len(deciding.conditions)
    seeds = comparison_of(table, 2 if is_auto else conditions).fewest_seeds
    places = {seed: place for place, seed in enumerate(deciding.planned_seeds)}
    together = {name: seeds for name in deciding.conditions}
    if is_auto:
        together |= dict.fromkeys(others[1:], min(seeds, plan.first_seeds))
    runs = [run for run in deciding.runs if places.get(run.seed, seeds) < together[run.condition]]
    # the round in which a budget of [decision] is used up ends
    begun = [run for run in runs if places[run.seed] < seeds - 1] if seeds > plan.first_seeds else []
    first = table.rungs[0] / table.rungs[-1] if table.rungs else 1.0
    searching = plan.total_steps - deciding.total_steps

    def taken(several: Sequence[RunPlan], whole: float | None, per: str) -> float:
        if table.per == per:
            end = table.rungs[0] if table.rungs else read_window(per, table.over).end or 0.0
            return len(several) * end / (plan.workers if per == "seconds" else 1)
        share = (searching + first * sum(run.max_steps for run in several)) / plan.total_steps
        return share * (whole or 0.0)

    def least(per: str) -> str:
        return "at least" if table.per == per else "about"

    usd, whole_usd = taken(runs, most.cost_usd, "usd"), plan.runs[0].config.budget.usd
    takes_usd = f"{least('usd')} {dollars(usd)}"
    if table.budget and taken(begun, most.time_s, "seconds") > parse_duration(table.budget):
        budget = f'[decision].budget = "{table.budget}"'
        takes = f"{least('seconds')} {about(taken(runs, most.time_s, 'seconds'))}"
    elif table.budget_usd is not None and taken(begun, most.cost_usd, "usd") > table.budget_usd:
        budget, takes = f"[decision].budget_usd = {table.budget_usd:g}", takes_usd
    elif whole_usd is not None and usd > whole_usd:
        budget, takes = f"[budget].usd = {whole_usd:g}", takes_usd
    else:
        return ""
    of = f"of {conditions} conditions"
    if is_auto and len(others) > 1 and not plan.search_seeds:
        of = f"of one condition and the reference, beside the first of all {conditions},"
    place = f", to {table.rungs[0]:,g} {AXES[table.per].unit}," if table.rungs else ""
    after = "the search and " if plan.search_seeds else ""
    return (
        f"{budget} ends before there can be a verdict: that needs {after}{count_of(seeds, 'seed')} "
        f"{of}{place} and takes {takes}; raise it, or ask for an earlier window or rung"
    )


def _expected(
    most: Most,
    table: DecisionSection,
    difference: float,
    unit: str,
    drawn: Callable[[tuple[int, int, int]], Floats],
) -> ExpectedSeeds:
    plan = most.plan
    if plan.search_seeds:  # the runs that decide are those on fresh seeds, whichever condition wins
        plan = fresh_plan(plan, next(name for name in plan.conditions if name != plan.reference))
    others = len(plan.conditions) - 1
    shares = []  # of the whole campaign that the budgets allow
    if table.budget and most.time_s:
        shares.append(parse_duration(table.budget) / most.time_s)
    if table.budget_usd is not None and most.cost_usd:
        shares.append(table.budget_usd / most.cost_usd)
    most_runs = math.inf  # after which of the runs that decide the budget is used up
    if shares:
        lacking = most.plan.total_steps * (1 - min(shares))
        most_runs = len(plan.runs) * (1 - lacking / plan.total_steps)
    differences = drawn((comparisons_simulated(others), others, len(plan.planned_seeds)))
    walks = [simulated(plan, table, values, most_runs) for values in differences]
    runs, deciding = np.mean([(len(walk.reach()), _steps(plan, walk)) for walk in walks], axis=0).tolist()
    sides = [Counter({run_id: side for side, run_id, _ in w.wanted.values()}.values()) for w in walks]
    seeds = [count[name] for count, walk in zip(sides, walks, strict=True) for name in walk.verdicts]
    differing = [verdict in FOUND for walk in walks for verdict in walk.verdicts.values()]
    whole = most.plan.total_steps
    steps = whole - plan.total_steps + deciding
    return ExpectedSeeds(
        difference=difference,
        unit=unit,
        seeds=float(np.mean(seeds)),
        found=float(np.mean(differing)),
        runs=len(most.plan.runs) - len(plan.runs) + runs,
        time_s=None if most.time_s is None else most.time_s * steps / whole,
        steps=steps,
        cost_usd=None if most.cost_usd is None else most.cost_usd * steps / whole,
        simulated=len(walks),
    )


def _steps(plan: Plan, walk: Walk) -> float:
    """Return the steps that a campaign's runs take, of which `finish` has some go on to their ends."""
    table, (waits, _) = walk.table, walk.ways()
    lengths = [(run.max_steps, waits[run.run_id]) for run in plan.runs if run.run_id in waits]
    if table.per == STEPS:
        return math.fsum(rung or end for end, rung in lengths)
    # where an amount is reached is not known
    return math.fsum(end * rung / table.rungs[-1] if rung else end for end, rung in lengths)


def comparisons_simulated(others: int) -> int:
    """Return how many campaigns are simulated, with so many conditions beside the reference."""
    if others > CROWDED:
        return max(1, FEWEST_SIMULATED * CROWDED**2 // others**2)
    return max(FEWEST_SIMULATED, SIMULATED // others)


def simulated(plan: Plan, table: DecisionSection, differences: Floats, most_runs: float = math.inf) -> Walk:
    """Return the end of a campaign with differences from the reference, shape (conditions, seeds, rungs)."""
    walk = Walk(plan, table, {})
    of_condition = dict(zip(walk.verdicts, differences.tolist(), strict=True))
    places = {seed: place for place, seed in enumerate(plan.planned_seeds)}
    values = {
        value_key(run.run_id, rung): of_condition[run.condition][places[run.seed]][number]
        if run.condition in of_condition
        else 0.0
        for run in plan.runs
        if run.seed in places
        for number, rung in enumerate(table.rungs or [0.0])
    }
    while not walk.is_over and (counts := walk.next_round()):
        if walk.wanted and walk.whole_runs >= most_runs:
            walk.close()
            break
        batch = walk.runs_of(counts)
        walk.wanted |= batch
        walk.look(counts, {key: values[key] for key in batch})
    return walk
