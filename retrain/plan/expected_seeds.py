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


def expected_seeds(plan: Plan, table: Decide, logs: Path, full_s: float | None) -> tuple[ExpectedSeeds, ...]:
    """Return what is expected without a difference, with the smallest that matters, and with twice that.

    Without a smallest difference, or while the spread is unknown, these are 0, 1 and 2 SD. `full_s` is how
    long all runs would take.
    """
    spread, smallest, others = (
        spread_of(plan, table, logs),
        table.smallest_difference,
        len(plan.conditions) - 1,
    )
    comparison = SequentialComparison(table.max_seeds, table.error, comparisons=others)
    unit, step, sd = "SD", 1.0, 1.0
    if spread is not None and smallest is not None:
        unit, step, sd = table.metric, smallest, spread
        comparison = replace(comparison, smallest_difference=smallest)
    return tuple(_expected(plan, comparison, times * step, unit, sd, full_s) for times in (0, 1, 2))


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
    plan: Plan,
    comparison: SequentialComparison,
    difference: float,
    unit: str,
    sd: float,
    full_s: float | None,
) -> ExpectedSeeds:
    others, rng = len(plan.conditions) - 1, np.random.default_rng(0)
    drawn = rng.normal(difference, sd, (max(1, SIMULATED // others), others, comparison.max_seeds))
    ends = [
        [comparison.end_of(one, np.zeros_like(one), plan.first_seeds) for one in campaign]
        for campaign in drawn
    ]
    seeds = np.array([[count for count, _ in campaign] for campaign in ends])
    runs = float(np.mean(seeds.sum(axis=1) + seeds.max(axis=1)))
    return ExpectedSeeds(
        difference=difference,
        unit=unit,
        seeds=float(seeds.mean()),
        found=float(np.mean([verdict in FOUND for campaign in ends for _, verdict in campaign])),
        runs=runs,
        time_s=None if full_s is None else full_s * runs / len(plan.runs),
    )
