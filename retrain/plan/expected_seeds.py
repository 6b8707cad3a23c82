"""How many seeds a campaign with `[decision]` is expected to need: simulated, for differences that may be.

The differences of pairs are drawn from a normal distribution, with the spread of the paired differences in
earlier campaigns. While that is unknown, differences are told in units of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from retrain.config.campaign import Decide
from retrain.controllers.sequential import SequentialComparison
from retrain.errors import ConfigError, RecordsError
from retrain.plan.matrix import Plan
from retrain.plan.search import fresh_plan
from retrain.records.decision import final_value
from retrain.records.files import readable
from retrain.records.layout import CampaignFiles, find_campaigns
from retrain.records.manifest import RunEntry, read_manifest
from retrain.records.run_state import RunState

SIMULATED = 60  # comparisons per difference: half a seed of error, in a second
LATEST = 20  # campaigns whose spread is read
FOUND = ("better", "worse")


@dataclass(frozen=True)
class ExpectedSeeds:
    """What a campaign needs if every condition differs this much from the reference."""

    difference: float
    unit: str  # the metric, or "SD": the standard deviation of a paired difference
    seeds: float  # of a condition, on average
    found: float  # share of conditions that are found to differ
    runs: float  # of the whole campaign, on average
    time_s: float | None  # about as long as these runs take; null while no step time is known
    steps: float  # of these runs
    cost_usd: float | None  # of these runs; null where it is not known


@dataclass(frozen=True)
class Most:
    """The runs of a campaign that takes as many as it may, and what these take."""

    plan: Plan
    time_s: float | None = None
    cost_usd: float | None = None


def expected_seeds(most: Most, table: Decide, logs: Path) -> tuple[ExpectedSeeds, ...]:
    """Return what is expected without a difference, with the smallest that matters, and with twice that.

    Without a smallest difference, or while the spread is unknown, these are 0, 1 and 2 SD. Of a search, the
    winner differs so much from the reference, unless that is the winner: then it takes the search alone.
    """
    spread, smallest = spread_of(most.plan, table, logs), table.smallest_difference
    compared = compared_in(most.plan)
    others = len(compared.conditions) - 1
    comparison = SequentialComparison(
        table.max_seeds, table.error, comparisons=others, early=table.allocate == "auto"
    )
    unit, step, sd = "SD", 1.0, 1.0
    if spread is not None and smallest is not None:
        unit, step, sd = table.metric, smallest, spread
        comparison = replace(comparison, smallest_difference=smallest)
    return tuple(_expected(most, compared, comparison, times * step, unit, sd) for times in (0, 1, 2))


def compared_in(plan: Plan) -> Plan:
    """Return the plan of the runs that decide: of a search, those on fresh seeds, whichever wins."""
    if not plan.search_seeds:
        return plan
    return fresh_plan(plan, next(name for name in plan.conditions if name != plan.reference))


def spread_of(plan: Plan, table: Decide, logs: Path) -> float | None:
    """Return the standard deviation of paired differences in earlier campaigns of these conditions."""
    squares, freedom = 0.0, 0
    for directory in _campaigns(logs):
        for differences in _paired(plan, table.metric, CampaignFiles(directory)):
            squares += float(np.var(differences)) * len(differences)
            freedom += len(differences) - 1
    return math.sqrt(squares / freedom) if freedom and squares else None


def _campaigns(logs: Path) -> Sequence[Path]:
    try:
        return find_campaigns(logs)[-LATEST:]
    except (ConfigError, RecordsError):  # nothing has run there
        return ()


def _paired(plan: Plan, metric: str, files: CampaignFiles) -> Iterator[list[float]]:
    manifest = readable(read_manifest, files.manifest)
    values: dict[str, dict[int, float]] = {}
    for run in manifest.runs if manifest else ():
        if run.state == RunState.DONE and run.condition in plan.conditions:
            value = _value(files, run, metric)
            if value is not None:
                values.setdefault(run.condition, {})[run.seed] = value
    reference = values.pop(plan.reference, {})
    for found in values.values():
        both = [found[seed] - reference[seed] for seed in found.keys() & reference.keys()]
        if len(both) > 1:
            yield both


def _value(files: CampaignFiles, run: RunEntry, metric: str) -> float | None:
    try:
        return final_value(files.existing_run(run.run_id), run.result or {}, metric)
    except RecordsError:
        return None


def _expected(
    most: Most,
    plan: Plan,
    comparison: SequentialComparison,
    difference: float,
    unit: str,
    sd: float,
) -> ExpectedSeeds:
    others, rng = len(plan.conditions) - 1, np.random.default_rng(0)
    drawn = rng.normal(difference, sd, (max(1, SIMULATED // others), others, comparison.max_seeds))
    ends = [
        [comparison.end_of(one, np.zeros_like(one), plan.first_seeds) for one in campaign]
        for campaign in drawn
    ]
    seeds = np.array([[count for count, _ in campaign] for campaign in ends])
    runs = float(np.mean(seeds.sum(axis=1) + seeds.max(axis=1)))
    whole = most.plan.total_steps
    steps = whole - plan.total_steps * (1 - runs / len(plan.runs))
    return ExpectedSeeds(
        difference=difference,
        unit=unit,
        seeds=float(seeds.mean()),
        found=float(np.mean([verdict in FOUND for campaign in ends for _, verdict in campaign])),
        runs=len(most.plan.runs) - len(plan.runs) + runs,
        time_s=None if most.time_s is None else most.time_s * steps / whole,
        steps=steps,
        cost_usd=None if most.cost_usd is None else most.cost_usd * steps / whole,
    )
