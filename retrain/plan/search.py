"""`[campaign.search]`: which runs a search needs next, and who goes on at its rungs.

All conditions run on the same seeds to a rung; the better part goes on from its checkpoints. The winner looks
better than it is, as it was chosen for its luck as well: so it and the reference run again on fresh seeds,
and `[decision]` decides by these alone.

Source: successive halving, Jamieson and Talwalkar 2016, arXiv:1502.07943.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TypeAlias

from retrain.base.errors import Problem
from retrain.config.keys import quote
from retrain.config.schema import SearchSection
from retrain.plan.decidable import unmeasured
from retrain.plan.matrix import Origin, Plan, RunPlan
from retrain.plan.proposals import sampler_problems
from retrain.records.decision import HELD_OUT, is_higher_better
from retrain.records.rungs import Rung
from retrain.records.text import number

WON = "won the search"
ValueAt: TypeAlias = Callable[[RunPlan, int], tuple[bool, float | None]]  # whether a run is there, its value


@dataclass(frozen=True)
class Climb:
    """How far a search is, and what it needs next."""

    waits: Mapping[str, int]  # runs that are needed next, and where each waits; 0: it runs to its end
    over: Mapping[str, str]  # runs that go no further, and why
    rungs: tuple[Rung, ...]  # all that were decided
    wanted: frozenset[str] = field(default_factory=frozenset)  # all runs asked for so far
    winner: str = ""
    due: Mapping[str, float | None] | None = None  # values by condition, which the sampler goes on from


def climb(
    plan: Plan, table: SearchSection, decided: Sequence[Rung], value_at: ValueAt, to_come: int = 0
) -> Climb:
    """Return what a search needs next and what it has found.

    Args:
        plan: all runs.
        table: its keys.
        decided: rungs that were decided before, which stand.
        value_at: a run's value after a step, 0 for its end, and whether it got there; a run that failed
            got wherever it should, without a value.
        to_come: how many conditions a sampler has yet to propose; they join the others at the first rung.
    """
    runs = {
        name: [run for run in plan.runs if run.condition == name and run.seed in plan.search_seeds]
        for name in plan.conditions
    }
    wanted_ids = frozenset(run.run_id for several in runs.values() for run in several)
    alive, rungs, over = runs, list(decided), dict[str, str]()
    steps = [rung.step for rung in decided]  # these stand if the file changed
    steps += [*(step for step in table.rungs if step > max(steps, default=0)), 0]  # 0: the end
    if to_come and not decided:
        values, waits = ({}, {}) if to_come == table.trials else _values_after(alive, steps[0], value_at)
        return Climb(waits, over, (), wanted_ids, due=None if waits else _scores(values))
    for place, step in enumerate(steps):
        if len(alive) == 1:
            break
        if place == len(rungs):
            values, waits = _values_after(alive, step, value_at)
            if waits:
                return Climb(waits, over, tuple(rungs), wanted_ids)
            last = max(run.max_steps for several in alive.values() for run in several)
            rungs.append(_rung(table, step or last, values, is_last=not step))
        rung = rungs[place]
        if step:
            for name in (name for name in alive if name not in rung.kept):
                score = rung.scores.get(name)
                value = "no value" if score is None else f"{table.metric} {number(score)}"
                why = f"dropped at step {rung.step}: {value}; {len(rung.kept)} of {len(rung.scores)} went on"
                over |= {run.run_id: why for run in alive[name]}
        alive = {name: runs[name] for name in rung.kept if name in runs} or alive
    winner = next(iter(alive))
    over |= {run.run_id: WON for run in runs[winner] if run.run_id not in over}
    return Climb({}, over, tuple(rungs), wanted_ids, winner)


def _values_after(
    alive: Mapping[str, Sequence[RunPlan]], step: int, value_at: ValueAt
) -> tuple[dict[str, list[float | None]], dict[str, int]]:
    """Return the values of conditions after a step, and the runs that are not there yet, with that step."""
    answers = {name: [value_at(run, step) for run in several] for name, several in alive.items()}
    waits = {
        run.run_id: step
        for name, several in alive.items()
        for run, (is_there, _) in zip(several, answers[name], strict=True)
        if not is_there
    }
    return {name: [value for _, value in pairs] for name, pairs in answers.items()}, waits


def _rung(
    table: SearchSection, step: int, values: Mapping[str, Sequence[float | None]], *, is_last: bool
) -> Rung:
    scores = _scores(values)
    sign = 1.0 if is_higher_better(table.metric) is False else -1.0
    ranked = sorted(scores, key=lambda name: (scores[name] is None, sign * (scores[name] or 0.0)))
    return Rung(step, scores, tuple(ranked[: 1 if is_last else _kept(table, len(scores))]))


def _scores(values: Mapping[str, Sequence[float | None]]) -> dict[str, float | None]:
    """Return each condition's mean over its seeds; None if a run has no value."""
    scores: dict[str, float | None] = {}
    for name, several in values.items():
        numbers = [value for value in several if value is not None]
        scores[name] = statistics.fmean(numbers) if len(numbers) == len(several) else None
    return scores


def fresh_plan(plan: Plan, winner: str) -> Plan:
    """Return the plan of the comparison that decides: winner and reference, on seeds that chose neither."""
    names = (plan.reference, winner)
    runs = [run for run in plan.runs if run.condition in names and run.seed not in plan.search_seeds]
    reference = replace(plan.decision, reference=plan.reference) if plan.decision else None
    ordered = sorted(runs, key=lambda run: (plan.seeds.index(run.seed), names.index(run.condition)))
    return replace(plan, runs=tuple(ordered), decision=reference, search_seeds=())


def stages_of(plan: Plan, table: SearchSection, to_come: int = 0) -> Iterator[tuple[int, int]]:
    """Iterate over how many conditions run to which step; 0: to their ends."""
    alive = len(plan.conditions) + to_come
    for step in (*table.rungs, 0):
        yield alive, step
        alive = _kept(table, alive)
        if alive == 1:
            return


def _kept(table: SearchSection, count: int) -> int:
    return max(1, math.floor(table.keep * count + 1e-9))


def most_runs(plan: Plan, table: SearchSection) -> tuple[RunPlan, ...]:
    """Return runs that cost as much as a search can: the last conditions are dropped, the first win.

    Points that a sampler has yet to propose are taken to cost what the first condition does.
    """
    if table.sampler:
        trials = (
            replace(run, run_id=f"trial-{n}_s{run.seed}", condition=f"trial {n}", origin=Origin.PROPOSED)
            for n in range(1, (table.trials or 0) + 1)
            for run in plan.runs
            if run.condition == plan.conditions[0]
        )
        plan = replace(plan, runs=(*plan.runs, *trials))
    names, ends = plan.conditions, dict.fromkeys(plan.conditions, 0)
    for count, step in stages_of(plan, table):
        ends |= dict.fromkeys(names[:count], step)
    chosen = []
    for run in plan.runs:
        if run.seed in plan.search_seeds:
            max_steps = ends[run.condition] or run.max_steps
            training = replace(run.config.training, max_steps=max_steps)
            chosen.append(replace(run, config=replace(run.config, training=training)))
    return (*chosen, *fresh_plan(plan, next(name for name in names if name != plan.reference)).runs)


def search_problems(plan: Plan, table: SearchSection) -> Iterator[Problem]:
    """Iterate over the problems of `[campaign.search]`, each with its place in it."""
    if len(plan.conditions) < 2 and not table.sampler:
        what = "chooses among conditions, and there is one; add some, or sweep a key in [campaign.sweep]"
        yield Problem((), what)
    if plan.added_seeds:
        yield Problem((), "adds fresh seeds by itself; instead of adding seeds, raise decision.max_seeds")
    runs = plan.first_runs
    if sorted(set(table.rungs)) != list(table.rungs):
        what = f"got {quote(table.rungs)}; needs steps in ascending order, each once"
        yield Problem(("rungs",), what)
    if not table.rungs and not table.sampler:
        yield Problem(("rungs",), "is missing; give the steps at which the worse conditions are dropped")
    short = next((run for run in runs.values() if table.rungs and table.rungs[-1] >= run.max_steps), None)
    if short is not None:
        most = f"max_steps = {short.max_steps} of {short.condition}"
        yield Problem(("rungs",), f"got {table.rungs[-1]}; needs steps below {most}")
    if problem := unmeasured(table.metric, {name: run.config for name, run in runs.items()}):
        yield Problem(("metric",), problem)
    else:
        yield from islice(_late(table, runs), 1)
    proposed = len(plan.proposed_conditions)
    if not proposed or proposed < (table.trials or 0):  # else it is not asked again, and not needed
        yield from sampler_problems(table, plan.campaign.sweep, len(plan.conditions) - proposed)


def _late(table: SearchSection, runs: Mapping[str, RunPlan]) -> Iterator[Problem]:
    """Iterate over the rungs at which a condition does not evaluate what decides."""
    if not table.metric.startswith(HELD_OUT):  # then it is in every row
        return
    for name, run in runs.items():
        periods = {f"{HELD_OUT}{evaluation.name}_": evaluation.every for evaluation in run.config.eval.tables}
        named = [every for prefix, every in periods.items() if table.metric.startswith(prefix)]
        every = named[0] if named else run.config.training.eval_every
        for step in table.rungs:
            if every <= 0 or step % every:
                what = f"no row of {name} at step {step} will have {quote(table.metric)}"
                yield Problem(("metric",), f"{what}; evaluate there")
