"""What a verdict costs by `[decision]`, beside a campaign of 12 seeds to the end with a t test.

    python -m benchmarks.verdict                       400 campaigns per scenario and design (5 min of a core)
    python -m benchmarks.verdict --campaigns 100       fewer
    python -m benchmarks.verdict --scenario crossing   one scenario
    python -m benchmarks.verdict --curves FILE         draws seeds from measured curves instead
    python -m benchmarks.verdict --any-order           equal conditions, looks in the order that finds most

A scenario gives the learning curves of a reference and its alternatives over 400 steps. A curve is its
condition's mean with a pace that varies between runs, a level that a seed shares between conditions, a
drift that is correlated over steps, and the noise of each step; `SPREAD` is what the numpy backend's task
`sort` shows. Campaigns go through the rounds of `retrain.plan.decision.Walk`, the code that real ones run.
Costs are in sampled tokens, as shares of what all runs to the end take. The fixed campaign averages the last
tenth of steps, as is usual, and tests pairs of seeds at 5 % (Holm over alternatives).

A claim is false if it says that a condition differs where its curve up to there is that of the reference, or
if it has the wrong sign. `found` is the share of alternatives that differ in the design's own question and
are found. "the end" asks what the fixed campaign asks.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import ttest_rel

from benchmarks.suite import script_parser
from retrain import SequentialComparison
from retrain.config.load import load_config
from retrain.config.schema import DecisionSection
from retrain.plan.build import plan_runs
from retrain.plan.decision import Walk
from retrain.plan.matrix import Plan
from retrain.records.decision import ConditionDecision
from retrain.records.windows import Window, read_window

FloatArray = NDArray[np.float64]
STEPS, SEEDS, ERROR = 400, 12, 0.05
RUNGS = (100, 200, 400)
FOUND = ("better", "worse")
TIME = np.arange(1, STEPS + 1)


@dataclass(frozen=True)
class Spread:
    """How runs of one condition differ; standard deviations in units of the reward."""

    pace: float = 0.15  # of the logarithm of the time that learning takes
    level: float = 0.02  # of a seed, the same for all conditions
    drift: float = 0.03  # of a run, correlated over about 40 steps
    noise: float = 0.06  # of each step


SPREAD = Spread()
Curve = Callable[[FloatArray], FloatArray]  # mean reward after so many steps


def learns(height: float, pace: float) -> Curve:
    return lambda t: height * (1 - np.exp(-t / pace))


def from_then(step: int, before: Curve, after: float, over: float = 40) -> Curve:
    """A curve that leaves another at a step, for a height, within about `over` steps."""
    return lambda t: before(t) + after * np.where(t > step, 1 - np.exp(-np.maximum(t - step, 0) / over), 0)


def follows(mean: FloatArray) -> Curve:
    """A curve that was measured."""
    return lambda t: np.asarray(np.interp(t, TIME, mean))


def bumps(before: Curve, height: float, step: int, width: float = 45) -> Curve:
    """A curve that is above another around a step only."""
    return lambda t: before(t) + height * np.exp(-(((t - step) / width) ** 2))


BASE = learns(0.8, 90)


@dataclass(frozen=True)
class Scenario:
    """A reference and its alternatives."""

    curves: Sequence[Curve]  # the reference first
    designs: Mapping[str, Mapping[str, Any]]  # keys of `[decision]`
    tokens: Sequence[float] = ()  # of a step, of each condition; equal if none are given
    collapses: float = 0.0  # share of the last condition's runs that fall to 0 after step 250


Designs = dict[str, dict[str, Any]]  # keys of `[decision]`, by name
END: Designs = {"the end": {}}
WINDOWS: Designs = {
    "whole": {"over": "whole"},
    "rungs": {"over": "whole", "rungs": list(RUNGS)},
    "rungs, last": {"over": "last", "rungs": list(RUNGS)},
}
QUARTER: Designs = {"first 100": {"over": [1, 100]}}
HALF: Designs = {"first 200": {"over": [1, 200]}}
SCENARIOS = {
    "equal": Scenario((BASE, BASE), END | HALF | WINDOWS),
    "two equal": Scenario((BASE, BASE, BASE), END | WINDOWS),
    "level": Scenario((BASE, learns(0.85, 90)), END | HALF | WINDOWS),
    "plateau, a quarter separates": Scenario((BASE, learns(0.8, 45)), END | QUARTER | WINDOWS),
    "bump, half separates": Scenario((BASE, bumps(BASE, 0.49, 150)), END | HALF | WINDOWS),
    "lower bump": Scenario((BASE, bumps(BASE, 0.35, 150)), HALF),  # 2.2 deviations instead of 2.9
    "crossing": Scenario((BASE, learns(0.7, 50)), END | QUARTER | WINDOWS),
    "late bloomer": Scenario((BASE, from_then(200, BASE, 0.15)), END | WINDOWS),
    "collapse": Scenario((BASE, BASE), END | WINDOWS, collapses=0.7),
    "unequal costs, equal per token": Scenario(
        (BASE, learns(0.8, 45)),
        {"rungs per token": {"per": "tokens", "over": "whole", "rungs": [100, 200, 400]}},
        tokens=(1.0, 2.0),
    ),
    "unequal costs, better per token": Scenario(
        (BASE, learns(0.8, 25)),
        {"rungs per token": {"per": "tokens", "over": "whole", "rungs": [100, 200, 400]}},
        tokens=(1.0, 2.0),
    ),
    "two, a quarter and half separate": Scenario((BASE, learns(0.8, 50), learns(0.8, 68)), END | WINDOWS),
    "two, one equal to the end": Scenario((BASE, learns(0.8, 50), BASE), END | WINDOWS),
}


@dataclass(frozen=True)
class Drawn:
    """The runs of one campaign."""

    rewards: FloatArray  # conditions x seeds x steps
    tokens: FloatArray  # of a step, by condition
    late: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))

    def value(self, condition: int, seed: int, window: Window) -> float:
        """Return a run's value over a window, of whole steps."""
        ends = TIME if window.per == "steps" else TIME * self.tokens[condition]
        start, end = window.bounds(float(ends[-1]))
        row = self.rewards[condition, seed][(ends > start) & (ends <= end)]
        return float(row.mean())

    def cost(self, condition: int, end: float, per: str) -> float:
        """Return the tokens of a run up to an amount; 0 for its end."""
        whole = STEPS * float(self.tokens[condition])
        return whole if not end else end if per == "tokens" else end * float(self.tokens[condition])


def drawn(scenario: Scenario, rng: np.random.Generator) -> Drawn:
    count = len(scenario.curves)
    rewards = np.empty((count, SEEDS, STEPS))
    level = rng.normal(0, SPREAD.level, (SEEDS, 1))
    for i, curve in enumerate(scenario.curves):
        pace = np.exp(rng.normal(0, SPREAD.pace, (SEEDS, 1)))
        drift, decay = np.empty((SEEDS, STEPS)), np.exp(-1 / 40)
        drift[:, 0] = rng.normal(0, SPREAD.drift, SEEDS)
        steps = rng.normal(0, SPREAD.drift * np.sqrt(1 - decay**2), (SEEDS, STEPS))
        for t in range(1, STEPS):
            drift[:, t] = decay * drift[:, t - 1] + steps[:, t]
        rewards[i] = curve(TIME / pace) + level + drift + rng.normal(0, SPREAD.noise, (SEEDS, STEPS))
    if scenario.collapses:
        collapsed = rng.random(SEEDS) < scenario.collapses
        rewards[-1, collapsed, 250:] *= np.exp(-np.arange(STEPS - 250) / 30)
    return Drawn(rewards, np.array(scenario.tokens or [1.0] * count))


def truth(scenario: Scenario, alternative: int, window: Window) -> float:
    """Return the expected difference of an alternative over a window; 0 where the curves are the same."""
    if scenario.collapses and (window.end or STEPS) > 250:
        return -1.0
    first, other = scenario.curves[0], scenario.curves[alternative]
    tokens = scenario.tokens or [1.0] * len(scenario.curves)
    sides = []
    for curve, cost in ((first, tokens[0]), (other, tokens[alternative])):
        ends = TIME if window.per == "steps" else TIME * cost
        start, end = window.bounds(float(ends[-1]) if window.per == "steps" else STEPS)
        paces = np.exp(SPREAD.pace * np.linspace(-2.5, 2.5, 41))
        weights = np.exp(-(np.linspace(-2.5, 2.5, 41) ** 2) / 2)
        means = [curve(TIME / pace)[(ends > start) & (ends <= end)].mean() for pace in paces]
        sides.append(float(np.average(means, weights=weights)))
    return sides[1] - sides[0] if abs(sides[1] - sides[0]) > 6e-3 else 0.0


def planned(conditions: int, keys: Mapping[str, Any]) -> tuple[Plan, DecisionSection]:
    """Return the plan and the table of a campaign as it would be run."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    several = "".join(
        f'[[campaign.conditions]]\nname = "c{i}"\ntraining.lr = {i + 1}e-3\n' for i in range(conditions)
    )
    text = (
        '[training]\nbatch_size = 2\ngroup_size = 2\nmax_tokens = 4\n[data]\ntask = "successor"\n[decision]\n'
        f'metric = "mean_reward"\nmax_seeds = {SEEDS}\nerror = {ERROR}\n'
        + "\n".join(lines)
        + "\n[campaign]\n"
        f"seeds = [0, 1, 2]\nmax_steps = {STEPS}\n{several}"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "campaign.toml"
        path.write_text(text)
        plan = plan_runs(load_config(path), path.name)
    if plan.decision is None:
        raise RuntimeError("no decision")
    return plan, plan.decision


def walked(plan: Plan, table: DecisionSection, runs: Drawn) -> tuple[list[ConditionDecision], float]:
    """Return a campaign's verdicts, and its cost as a share of all runs to their ends."""
    walk, window = Walk(plan, table, {}), read_window(table.per, table.over)
    place = {run.run_id: (int(run.condition[1:]), run.seed) for run in plan.runs}
    found: list[ConditionDecision] = []
    while not walk.is_over and (counts := walk.next_round()):
        batch = walk.runs_of(counts)
        walk.wanted |= batch
        values = {
            key: runs.value(*place[run_id], Window(window.per, window.start, rung or window.end))
            for key, (_, run_id, rung) in batch.items()
        }
        found += [finding.described() for finding in walk.look(counts, values)]
    end = 0.0 if window.end is None else window.end
    cost = sum(runs.cost(place[r][0], rung or end, table.per) for r, rung in walk.reach().items())
    return found, cost / (SEEDS * STEPS * float(runs.tokens.sum()))


def fixed(runs: Drawn) -> list[float]:
    """Return the signed verdicts of t tests at the end over all seeds: 0 where nothing is found."""
    last = runs.rewards[:, :, -STEPS // 10 :].mean(axis=2)
    tests = [ttest_rel(other, last[0]) for other in last[1:]]
    order, signs, alive = np.argsort([test.pvalue for test in tests]), [0.0] * len(tests), True
    for rank, i in enumerate(order):
        alive &= bool(tests[i].pvalue < ERROR / (len(tests) - rank))
        signs[i] = float(np.sign(tests[i].statistic)) if alive else 0.0
    return signs


@dataclass(frozen=True)
class Row:
    """One scenario and design; shares in percent."""

    scenario: str
    design: str
    campaigns: int
    false: float  # campaigns with a false claim
    found: float | None  # of the alternatives that differ in some question of the design; none: null
    cost: float
    fixed_false: float
    fixed_found: float | None


def row_of(name: str, design: str, draws: Sequence[Drawn], scenario: Scenario) -> Row:
    plan, table = planned(len(scenario.curves), scenario.designs[design])
    window = read_window(table.per, table.over)
    others = range(1, len(scenario.curves))
    ends = table.rungs or [0.0]
    truths = {
        (i, rung): truth(scenario, i, Window(window.per, window.start, rung or window.end))
        for i in others
        for rung in ends
    }
    at_end = {i: truth(scenario, i, Window()) for i in others}
    false, found, costs, fixed_false, fixed_found = [], list[bool](), [], [], list[bool]()
    for runs in draws:
        verdicts, cost = walked(plan, table, runs)
        costs.append(cost)
        claims = {int(one.condition[1:]): one for one in verdicts if one.verdict in FOUND}
        signs = {i: 1 if one.verdict == "better" else -1 for i, one in claims.items()}
        false.append(any(signs[i] * truths[i, one.rung] <= 0 for i, one in claims.items()))
        found += [i in claims for i in others if any(truths[i, rung] for rung in ends)]
        by_t_test = fixed(runs)
        fixed_false.append(any(by_t_test[i - 1] and by_t_test[i - 1] * at_end[i] <= 0 for i in others))
        fixed_found += [by_t_test[i - 1] * at_end[i] > 0 for i in others if at_end[i]]

    def percent(shares: Sequence[float]) -> float:
        return round(100 * float(np.mean(shares)), 1)

    return Row(
        name,
        design,
        len(draws),
        percent(false),
        percent(found) if found else None,
        percent(costs),
        percent(fixed_false),
        percent(fixed_found) if fixed_found else None,
    )


def any_order(campaigns: int, alternatives: int) -> float:
    """Return in how many campaigns of equal conditions some look at some rung finds a difference, in percent.

    All seeds are run to all rungs, and no rung is ended early: whatever order of looks was chosen after the
    data, its first false claim is among these.
    """
    scenario, rng, wrong = Scenario((BASE,) * (alternatives + 1), {}), np.random.default_rng(1), 0
    share = SequentialComparison(SEEDS, ERROR / (alternatives * len(RUNGS)))
    for _ in range(campaigns):
        runs = drawn(scenario, rng)
        sides = np.array(
            [[[runs.value(c, s, Window(start=0.0, end=rung)) for s in range(SEEDS)] for rung in RUNGS]
             for c in range(alternatives + 1)]
        )  # fmt: skip
        wrong += any(
            share.test.outcome(np.rint((other - sides[0][r]) * 1e12), share.error).rejected_at
            for condition in sides[1:]
            for r, other in enumerate(condition)
        )
    return 100 * wrong / campaigns


def measured(path: Path) -> tuple[Scenario, Callable[[np.random.Generator], Drawn]]:
    """Return what was measured in real runs, as `benchmarks.studies.verdict_curves` writes it."""
    data = json.loads(path.read_text())
    rewards = np.array(data["rewards"])  # conditions x seeds x bins
    whole = np.repeat(rewards, STEPS // rewards.shape[2], axis=2)
    tokens = np.array(data["tokens"]) / data["tokens"][0]

    def draw(rng: np.random.Generator) -> Drawn:
        chosen = rng.choice(rewards.shape[1], SEEDS, replace=False)
        return Drawn(whole[:, chosen], tokens)

    means = whole.mean(axis=1)
    return Scenario([follows(mean) for mean in means], END | HALF | WINDOWS), draw


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--campaigns", type=int, default=400)
    parser.add_argument("--scenario", help=f"one of: {'; '.join(SCENARIOS)}")
    parser.add_argument("--curves", type=Path, help="file of measured curves")
    parser.add_argument("--any-order", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.any_order:
        for alternatives in (1, 2):
            print(
                f"{alternatives} alternatives, any order: {any_order(options.campaigns, alternatives):.1f} %"
            )
        return
    rows: list[Row] = []
    for name, scenario in SCENARIOS.items():
        if options.curves or options.scenario not in (None, name):
            continue
        rng = np.random.default_rng([7, *name.encode()])
        draws = [drawn(scenario, rng) for _ in range(options.campaigns)]
        rows += [row_of(name, design, draws, scenario) for design in scenario.designs]
    if options.curves:
        scenario, draw = measured(options.curves)
        rng = np.random.default_rng(7)
        draws = [draw(rng) for _ in range(options.campaigns)]
        rows += [row_of(options.curves.stem, design, draws, scenario) for design in scenario.designs]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table("scenario", "design", "false", "found", "cost", "fixed: false", "fixed: found")
    for row in rows:
        figures = (row.false, row.found, row.cost, row.fixed_false, row.fixed_found)
        table.add_row(row.scenario, row.design, *("-" if f is None else f"{f:.1f} %" for f in figures))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
