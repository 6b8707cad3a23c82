"""What `allocate = "auto"` saves against rounds of equal seeds, over simulated campaigns of five conditions.

    python -m benchmarks.allocation                     500 campaigns (3 min on an idle core)
    python -m benchmarks.allocation --campaigns 100     fewer

Four conditions are compared with a reference, with at most 12 seeds each. How far each is off, in standard
deviations of the paired difference, is drawn anew for every campaign, as is how long its runs take. Both
allocations see the same values. Budgets are shares of what all runs would take. With equal seeds, every
condition gets as many seeds as the one that took most.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from retrain.config.campaign import Decide
from retrain.config.load import load_config
from retrain.plan.decision import FOUND, Walk
from retrain.plan.matrix import Plan, plan_runs

FILE = """
[training]
batch_size = 2
group_size = 2
max_tokens = 4
[data]
task = "successor"
[decision]
metric = "mean_reward"
max_seeds = 12
[campaign]
seeds = [0, 1, 2]
max_steps = 1
""" + "".join(f'[[campaign.conditions]]\nname = "c{i}"\ntraining.lr = {i + 1}e-3\n' for i in range(5))
OFF = (0.0, 0.0, 0.5, 1.0, 1.5, 2.0)  # each as likely
SECONDS = (0.5, 1.0, 2.0)
BUDGETS = (0.4, 0.5, 0.6, 0.7, 1.0)  # 1: no limit
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Drawn:
    """One campaign: the value of every run, how far conditions are off, and what a run costs."""

    values: FloatArray  # conditions x seeds; the first is the reference
    off: FloatArray
    seconds: dict[str, float]


def drawn(plan: Plan, rng: np.random.Generator, *, are_equal: bool) -> Drawn:
    shape = len(plan.conditions), len(plan.planned_seeds)
    off = np.zeros(shape[0]) if are_equal else np.append(0.0, rng.choice(OFF, shape[0] - 1))
    values = rng.normal(size=shape) / sqrt(2) + off[:, None]
    return Drawn(
        values, off, dict(zip(plan.conditions, map(float, rng.choice(SECONDS, shape[0])), strict=True))
    )


def run(plan: Plan, table: Decide, one: Drawn, share: float) -> tuple[float, float, dict[str, str]]:
    """Return what a campaign cost, what equal seeds of all conditions had cost, and its verdicts."""
    walk, spent = Walk(plan, table, one.seconds), 0.0
    limit = share * sum(one.seconds.values()) * len(plan.planned_seeds)
    at = {
        (name, seed): value
        for name, values in zip(plan.conditions, one.values.tolist(), strict=True)
        for seed, value in zip(plan.planned_seeds, values, strict=True)
    }
    value = {run.run_id: at[run.condition, run.seed] for run in plan.runs}
    of = {run.run_id: run.condition for run in plan.runs}
    while not walk.is_over:
        if share < 1 and spent >= limit:
            walk.close()
            break
        asked = walk.next_round()
        batch = walk.runs_of(asked)
        walk.wanted |= batch
        spent += sum(one.seconds[of[run_id]] for run_id in batch)
        walk.look(asked, {run_id: value[run_id] for run_id in batch})
    seeds = max(seed for (name, seed), run_id in walk.ids.items() if run_id in walk.wanted) + 1
    return spent, seeds * sum(one.seconds.values()), walk.verdicts


@dataclass(frozen=True)
class Row:
    """One allocation within one budget; shares in percent."""

    allocate: str
    budget: float  # of what all runs take
    cost: float  # spent, of what all runs take
    of_equal: float  # spent, of what it takes to run every condition until the last one is decided
    power: float  # conditions that are off and found, in the right direction
    error: float  # campaigns with a false verdict


def rows_of(plan: Plan, tables: list[Decide], campaigns: list[Drawn], budgets: Sequence[float]) -> list[Row]:
    """Return a row per allocation and budget; both see the same campaigns, one after another."""
    ends = [
        [(one, *run(plan, table, one, share)) for table in tables for share in budgets] for one in campaigns
    ]
    kinds = [(table.allocate, share) for table in tables for share in budgets]
    return [
        Row(*kind, *_shares(plan, each)) for kind, each in zip(kinds, zip(*ends, strict=True), strict=True)
    ]


def _shares(plan: Plan, ends: Sequence[tuple[Drawn, float, float, dict[str, str]]]) -> Iterator[float]:
    costs, of_equal, power, false = [], [], [], []
    for one, spent, equal, verdicts in ends:
        costs.append(spent / (sum(one.seconds.values()) * len(plan.planned_seeds)))
        of_equal.append(spent / equal)
        found, off = np.array([verdicts[name] for name in plan.conditions[1:]]), one.off[1:]
        power += (found[off > 0] == "better").tolist()
        false.append(bool(np.isin(found[off == 0], FOUND).any() or (found[off > 0] == "worse").any()))
    return (100 * float(np.mean(each)) if each else 0.0 for each in (costs, of_equal, power, false))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--campaigns", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "campaign.toml"
        path.write_text(FILE)
        plan = plan_runs(load_config(path), path.name)
    assert plan.decision is not None
    rows = {}
    for kind in ("mixed", "equal"):
        campaigns = [drawn(plan, rng, are_equal=kind == "equal") for _ in range(options.campaigns)]
        budgets = BUDGETS if kind == "mixed" else (0.6, 1.0)
        tables = [replace(plan.decision, allocate=how) for how in ("equal", "auto")]
        rows[kind] = rows_of(plan, tables, campaigns, budgets)
    if options.json:
        print(json.dumps({kind: [asdict(row) for row in each] for kind, each in rows.items()}))
        return
    table = Table(
        "conditions",
        "allocate",
        "budget, %",
        "cost, %",
        "of equal seeds, %",
        "power, %",
        "error, %",
        box=None,
    )
    for kind, each in rows.items():
        for row in each:
            table.add_row(
                kind,
                row.allocate,
                f"{100 * row.budget:.0f}",
                *(f"{x:.1f}" for x in (row.cost, row.of_equal, row.power, row.error)),
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
