"""What `allocate = "auto"` costs beside rounds of equal seeds, at the same power: simulated campaigns.

    python -m benchmarks.studies.allocation                   500 campaigns per scenario (15 min of a core)
    python -m benchmarks.studies.allocation --campaigns 100   fewer
    python -m benchmarks.studies.allocation --scenario mixed  one scenario

Four conditions are compared with a reference, with at most 12 seeds each, three at first. A scenario tells
how far each is off, in standard deviations of the paired difference, how long its runs take, and how widely
they vary. All allocations see the same values. Costs are shares of what all 60 runs take. For each power that
"auto" reaches with some budget, the budget is looked for with which rounds reach the same: the ratio of what
both cost is the answer. "rounds" are those of `allocate = "equal"`, where conditions with a verdict get no
further seeds. With "equal seeds", every condition gets as many as the one that takes most.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.evidence import METRICS
from benchmarks.suite import script_parser
from retrain.config.load import load_config
from retrain.config.schema import DecisionSection
from retrain.plan.build import plan_runs
from retrain.plan.decidable import FOUND
from retrain.plan.decision import Walk
from retrain.plan.matrix import Plan
from retrain.records.decision import OPEN

SEEDS = 12
FILE = f"""
[training]
batch_size = 2
group_size = 2
max_tokens = 4
[data]
task = "successor"
[decision]
metric = "mean_reward"
max_seeds = {SEEDS}
[campaign]
seeds = [0, 1, 2]
max_steps = 1
""" + "".join(f'[[campaign.conditions]]\nname = "c{i}"\ntraining.lr = {i + 1}e-3\n' for i in range(5))
MIXED = (0.0, 0.0, 0.5, 1.0, 1.5, 2.0)
BUDGETS = (0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 2.0)  # of what all runs take; 2: no limit
FINE = (*np.arange(0.3, 1.0, 0.01), 2.0)
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Scenario:
    """How campaigns are drawn."""

    off: Sequence[float]  # of the four conditions, in any order; or drawn from more than four
    seconds: Sequence[float] = (1.0,)  # of a run, drawn per condition
    spread: Sequence[float] = (1.0,)  # of a run's value, drawn per condition
    metric: str = "normal"  # its distribution, as `benchmarks.evidence` names it


SCENARIOS = {
    "mixed": Scenario(MIXED),
    "costs differ": Scenario(MIXED, seconds=(0.25, 1.0, 4.0)),
    "spreads differ": Scenario(MIXED, spread=(0.5, 1.0, 2.0)),
    "one at the border": Scenario((0.0, 0.0, 1.0, 2.0)),
    "one differs": Scenario((0.0, 0.0, 0.0, 1.5)),
    "all differ": Scenario((0.5, 1.0, 1.5, 2.0)),
    **{f"equal, {name}": Scenario((0.0, 0.0, 0.0, 0.0), metric=name) for name in METRICS},
    **{f"one differs, {name}": Scenario((0.0, 0.0, 0.0, 2.0), metric=name) for name in METRICS},
}
SCENARIO_HELP = f"one of: {'; '.join(SCENARIOS)}"


@dataclass(frozen=True)
class Drawn:
    """One campaign: the value of every run, how far conditions are off, and what a run costs."""

    values: FloatArray  # conditions x seeds; the first is the reference
    off: Mapping[str, float]
    seconds: dict[str, float]


@dataclass(frozen=True)
class State:
    """What a campaign has spent and found after a round."""

    cost: float  # of what all runs take
    seeds: float  # of the condition that has most, of all seeds: the cost if every condition had as many
    found: int  # conditions that are off
    is_false: bool  # any verdict
    found_last: int  # if the budget is used up now, and what is open is looked at a last time
    is_false_last: bool


@dataclass
class Trace:
    """A campaign from its first round to its last."""

    states: list[State] = field(default_factory=list)

    def at(self, budget: float, *, all_seeds: bool = False) -> tuple[float, int, bool]:
        """Return cost, conditions found and whether any verdict is false, with a budget."""
        for state in self.states:
            cost = state.seeds if all_seeds else state.cost
            if cost >= budget - 1e-9 and state is not self.states[-1]:
                return cost, state.found_last, state.is_false_last
        return cost, state.found, state.is_false


@dataclass(frozen=True)
class Row:
    """ "auto" within one budget; shares in percent."""

    scenario: str
    budget: float  # of what all runs take
    cost: float
    power: float  # conditions that are off and found, in the right direction
    rounds: (
        float  # cost of "auto" relative to that of rounds with the same power; NaN if these never reach it
    )
    equal: float  # relative to that of equal seeds for all
    error: float  # campaigns with a false verdict
    rounds_power: float  # with the same budget
    rounds_error: float


def planned() -> tuple[Plan, DecisionSection]:
    """Return the plan of all campaigns, and how rounds of equal seeds decide."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "campaign.toml"
        path.write_text(FILE)
        plan = plan_runs(load_config(path), path.name)
    assert plan.decision is not None
    return plan, plan.decision


def drawn(plan: Plan, scenario: Scenario, rng: np.random.Generator) -> Drawn:
    names = list(plan.conditions)
    shape = len(names), SEEDS
    some = rng.permutation(scenario.off) if len(scenario.off) == len(names) - 1 else None
    off = np.append(0.0, rng.choice(scenario.off, len(names) - 1) if some is None else some)
    spread = rng.choice(scenario.spread, len(names)) / sqrt(2)
    draw, variance = METRICS[scenario.metric]
    noise = draw(rng, shape) / sqrt(variance)
    values = noise * spread[:, None] + (off * np.hypot(spread, spread[0]))[:, None]
    seconds = map(float, rng.choice(scenario.seconds, len(names)))
    return Drawn(values, dict(zip(names, off, strict=True)), dict(zip(names, seconds, strict=True)))


def traced(plan: Plan, table: DecisionSection, one: Drawn, walk_of: Callable[..., Walk] = Walk) -> Trace:
    """Return the campaign under an allocation, without a limit."""
    walk, trace, spent = walk_of(plan, table, one.seconds), Trace(), 0.0
    whole = sum(one.seconds.values()) * SEEDS
    values = dict(zip(plan.conditions, one.values.tolist(), strict=True))
    value = {run.run_id: values[run.condition][plan.planned_seeds.index(run.seed)] for run in plan.runs}
    of = {run.run_id: run.condition for run in plan.runs}
    while not walk.is_over:
        asked = walk.next_round()
        batch = walk.runs_of(asked)
        walk.wanted |= batch
        spent += sum(one.seconds[of[run_id]] for run_id in batch)
        walk.look(asked, {run_id: value[run_id] for run_id in batch})
        still = [name for name, verdict in walk.verdicts.items() if verdict == OPEN]
        last = walk.verdicts | {name: walk.finding(name, is_last=True).verdict for name in still}
        seeds = sum(run_id in walk.wanted for run_id in of if of[run_id] == plan.reference)
        counts = (*_right(walk.verdicts, one), *_right(last, one))
        trace.states.append(State(spent / whole, seeds / SEEDS, *counts))
    return trace


def _right(verdicts: Mapping[str, str], one: Drawn) -> tuple[int, bool]:
    """Return how many conditions were rightly found, and whether any verdict is false."""
    found = {name: verdict for name, verdict in verdicts.items() if verdict in FOUND}
    right = sum(one.off[name] > 0 and verdict == "better" for name, verdict in found.items())
    return right, right < len(found)


def curve(
    traces: Sequence[Trace], differing: int, budgets: Sequence[float], *, all_seeds: bool = False
) -> FloatArray:
    """Return mean cost, power and error of each budget, in percent: shape (budgets, 3)."""
    rows = []
    for budget in budgets:
        cost, found, false = zip(*(one.at(budget, all_seeds=all_seeds) for one in traces), strict=True)
        power = sum(found) / differing if differing else 0.0
        rows.append((float(np.mean(cost)), power, float(np.mean(false))))
    return 100 * np.array(rows)


def cost_for(power: float, known: FloatArray) -> float:
    """Return the cost for a power, between the budgets of a curve."""
    known = known[np.argsort(known[:, 0])]
    reached = np.maximum.accumulate(known[:, 1])
    if not 0.0 < power <= reached[-1]:
        return float("nan")
    at = int(np.argmax(reached >= power))
    before = max(at - 1, 0)
    return float(np.interp(power, reached[[before, at]], known[[before, at], 0]))


def rows_of(name: str, plan: Plan, table: DecisionSection, campaigns: Sequence[Drawn]) -> list[Row]:
    differing = sum(off > 0 for one in campaigns for off in one.off.values())
    equal, auto = (
        [traced(plan, replace(table, allocate=how), one) for one in campaigns] for how in ("equal", "auto")
    )
    rounds, all_equal = (curve(equal, differing, FINE, all_seeds=each) for each in (False, True))
    pairs = zip(BUDGETS, curve(auto, differing, BUDGETS), curve(equal, differing, BUDGETS), strict=True)
    rows = []
    for budget, (cost, power, error), (_, rounds_power, rounds_error) in pairs:
        of_rounds, of_equal = (100 * cost / cost_for(power, each) for each in (rounds, all_equal))
        figures = 100 * budget, cost, power, of_rounds, of_equal, error, rounds_power, rounds_error
        rows.append(Row(name, *figures))
    return rows


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--campaigns", type=int, default=500)
    parser.add_argument("--scenario", choices=SCENARIOS, metavar="NAME", help=SCENARIO_HELP)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    plan, equal = planned()
    rows = []
    for name in [options.scenario] if options.scenario else SCENARIOS:
        rng = np.random.default_rng(options.seed)
        campaigns = [drawn(plan, SCENARIOS[name], rng) for _ in range(options.campaigns)]
        rows += rows_of(name, plan, equal, campaigns)
    if options.json:
        plain = (
            {key: None if value != value else value for key, value in asdict(row).items()} for row in rows
        )
        print(json.dumps(list(plain)))
        return
    columns = ("scenario", "budget", "cost", "power", "of rounds", "of equal seeds", "error")
    table = Table(*columns, "rounds: power", "error", box=None, title="percent")
    for row in rows:
        figures = list(asdict(row).values())[2:]
        budget = "none" if row.budget > 100 else f"{row.budget:.0f}"
        table.add_row(row.scenario, budget, *("" if np.isnan(x) else f"{x:.1f}" for x in figures))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
