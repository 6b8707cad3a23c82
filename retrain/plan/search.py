"""`[campaign.search]`: which runs a search needs next, and who goes on at its rungs.

All conditions run on the same seeds to a rung; the better part goes on from its checkpoints. The winner looks
better than it is, as it was chosen for its luck as well: so it and the reference run again on fresh seeds,
and `[decision]` decides by these alone.

Source: successive halving, Jamieson and Talwalkar 2016, arXiv:1502.07943.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from retrain.config.campaign import Search
from retrain.config.keys import quote
from retrain.errors import ConfigError
from retrain.plan.decidable import metrics_of_config
from retrain.plan.matrix import Plan, RunPlan
from retrain.plan.proposals import sampler_problems
from retrain.records.decision import HELD_OUT, is_higher_better
from retrain.records.rungs import Rung
from retrain.records.text import number
from retrain.registry import hint

WON = "won the search; it runs again on fresh seeds"


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
    plan: Plan,
    table: Search,
    known: Sequence[Rung],
    value_at: Callable[[RunPlan, int], tuple[bool, float | None]],
    to_come: int = 0,
) -> Climb:
    """Return what a search needs next and what it has found.

    Args:
        plan: all runs.
        table: its keys.
        known: rungs that were decided before, which stand.
        value_at: a run's value after a step, 0 for its end, and whether it got there; a run that failed
            got wherever it should, without a value.
        to_come: how many conditions a sampler has yet to propose; they join the others at the first rung.
    """
    alive = runs = {
        name: [run for run in plan.runs if run.condition == name and run.seed in plan.search_seeds]
        for name in plan.conditions
    }
    wanted = frozenset(run.run_id for several in runs.values() for run in several)
    over: dict[str, str] = {}
    rungs, is_growing = list(known), to_come > 0 and not known
    if is_growing and to_come == table.trials:  # the first are proposed at once
        return Climb({}, over, (), wanted, due={})
    for place, step in enumerate(_steps(table, known)):
        if len(alive) == 1:
            break
        if place == len(rungs):
            values, waits = _look(alive, step, value_at)
            if waits:
                return Climb(waits, over, tuple(rungs), wanted)
            if is_growing:
                return Climb({}, over, (), wanted, due=_scores(values))
            rungs.append(_rung(table, step or _last_step(alive), values, is_last=not step))
        one = rungs[place]
        if step:
            over |= _dropped(one, alive, table.metric)
        alive = {name: runs[name] for name in one.kept if name in runs} or alive
    winner = next(iter(alive))
    over |= {run.run_id: WON for run in runs[winner] if run.run_id not in over}
    return Climb({}, over, tuple(rungs), wanted, winner)


def _look(
    alive: Mapping[str, Sequence[RunPlan]],
    step: int,
    value_at: Callable[[RunPlan, int], tuple[bool, float | None]],
) -> tuple[dict[str, list[float | None]], dict[str, int]]:
    """Return the values of conditions after a step, and the runs that are not there yet, with that step."""
    found = {name: [value_at(run, step) for run in several] for name, several in alive.items()}
    waits = {
        run.run_id: step
        for name, several in alive.items()
        for run, (is_there, _) in zip(several, found[name], strict=True)
        if not is_there
    }
    return {name: [value for _, value in seen] for name, seen in found.items()}, waits


def _last_step(alive: Mapping[str, Sequence[RunPlan]]) -> int:
    return max(run.max_steps for several in alive.values() for run in several)


def _steps(table: Search, known: Sequence[Rung]) -> Sequence[int]:
    """Return the steps of all rungs, 0 for the end; those that were decided stand if the file changed."""
    decided = [one.step for one in known]
    return [*decided, *(step for step in table.rungs if step > max(decided, default=0)), 0]


def _rung(table: Search, step: int, values: Mapping[str, Sequence[float | None]], *, is_last: bool) -> Rung:
    scores = _scores(values)
    sign = 1.0 if is_higher_better(table.metric) is False else -1.0

    def place(name: str) -> tuple[bool, float]:
        score = scores[name]
        return score is None, 0.0 if score is None else sign * score

    count = 1 if is_last else _kept(table, len(scores))
    return Rung(step, scores, tuple(sorted(scores, key=place)[:count]))


def _scores(values: Mapping[str, Sequence[float | None]]) -> dict[str, float | None]:
    """Return each condition's mean over its seeds; None if a run has no value."""
    known = {name: [one for one in several if one is not None] for name, several in values.items()}
    return {
        name: math.fsum(several) / len(several) if len(several) == len(values[name]) else None
        for name, several in known.items()
    }


def _dropped(one: Rung, runs: Mapping[str, Sequence[RunPlan]], metric: str) -> Iterator[tuple[str, str]]:
    for name, several in runs.items():
        if name not in one.kept:
            score = one.scores.get(name)
            value = "no value" if score is None else f"{metric} {number(score)}"
            why = f"dropped at step {one.step}: {value}; {len(one.kept)} of {len(one.scores)} went on"
            yield from ((run.run_id, why) for run in several)


def fresh_plan(plan: Plan, winner: str) -> Plan:
    """Return the plan of the comparison that decides: winner and reference, on seeds that chose neither."""
    names = (plan.reference, winner)
    runs = [run for run in plan.runs if run.condition in names and run.seed not in plan.search_seeds]
    reference = replace(plan.decision, reference=plan.reference) if plan.decision else None
    ordered = sorted(runs, key=lambda run: (plan.seeds.index(run.seed), names.index(run.condition)))
    return replace(plan, runs=tuple(ordered), decision=reference, search_seeds=())


def stages_of(plan: Plan, table: Search, to_come: int = 0) -> Iterator[tuple[int, int]]:
    """Iterate over how many conditions run to which step; 0: to their ends."""
    alive = len(plan.conditions) + to_come
    for step in (*table.rungs, 0):
        yield alive, step
        alive = _kept(table, alive)
        if alive == 1:
            return


def _kept(table: Search, count: int) -> int:
    return max(1, math.floor(table.keep * count + 1e-9))


def most_runs(plan: Plan, table: Search) -> tuple[RunPlan, ...]:
    """Return runs that cost as much as a search can: the last conditions are dropped, the first win.

    Points that a sampler has yet to propose are taken to cost what the first condition does.
    """
    if table.sampler:
        plan = replace(plan, runs=(*plan.runs, *_trials(plan, table.trials or 0)))
    total, ends = plan.conditions, dict.fromkeys(plan.conditions, 0)
    for count, step in stages_of(plan, table):
        ends |= dict.fromkeys(total[:count], step)
    chosen = [_until(run, ends[run.condition]) for run in plan.runs if run.seed in plan.search_seeds]
    return (*chosen, *fresh_plan(plan, next(name for name in total if name != plan.reference)).runs)


def _trials(plan: Plan, count: int) -> Iterator[RunPlan]:
    for trial in range(1, count + 1):
        for run in plan.runs:
            if run.condition == plan.conditions[0]:
                yield replace(run, run_id=f"trial-{trial}_s{run.seed}", condition=f"trial {trial}")


def _until(run: RunPlan, step: int) -> RunPlan:
    if not step:
        return run
    training = replace(run.config.training, max_steps=step)
    return replace(run, config=replace(run.config, training=training))


def require_searchable(plan: Plan, table: Search, source: str) -> None:
    """Raise ConfigError with every problem of `[campaign.search]`."""
    if problems := list(_problems(plan, table)):
        raise ConfigError([f"{source} [campaign.search]{problem}" for problem in problems])


def _problems(plan: Plan, table: Search) -> Iterator[str]:
    if len(plan.conditions) < 2 and not table.sampler:
        yield ": chooses among conditions, and there is one; add some, or sweep a key in [campaign.sweep]"
    if plan.added_seeds:
        yield ": adds fresh seeds by itself; instead of adding seeds, raise decision.max_seeds"
    if sorted(set(table.rungs)) != list(table.rungs):
        yield f".rungs: got {quote(table.rungs)}; needs steps in ascending order, each once"
    if not (table.rungs or table.sampler):
        yield ".rungs: is missing; give the steps at which the worse conditions are dropped"
    for name, run in plan.first_runs().items():
        if table.rungs and table.rungs[-1] >= run.max_steps:
            yield f".rungs: got {table.rungs[-1]}; needs steps below max_steps = {run.max_steps} of {name}"
            break
    for name, run in plan.first_runs().items():
        known = metrics_of_config(run.config)
        if table.metric not in known:
            others = hint(table.metric, known, f"there are {', '.join(known)}")
            yield f".metric: no row of {name} will have {quote(table.metric)}; {others}"
            break
        if late := [step for step in table.rungs if not _is_known(run, table.metric, step)]:
            what = f"no row of {name} at step {late[0]} will have {quote(table.metric)}"
            yield f".metric: {what}; evaluate there"
            break
    yield from sampler_problems(table, plan.campaign.sweep, len(plan.own_conditions))


def _is_known(run: RunPlan, metric: str, step: int) -> bool:
    """Whether a run evaluates at a step what decides there; other metrics are in every row."""
    if not metric.startswith(HELD_OUT):
        return True
    named = [one for one in run.config.eval.tables if metric.startswith(f"{HELD_OUT}{one.name}_")]
    every = named[0].every if named else run.config.training.eval_every
    return every > 0 and step % every == 0
