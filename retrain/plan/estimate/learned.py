"""Derives the cost of a plan's runs from a history: matches earlier runs with conditions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import chain
from typing import Literal

from retrain.config.keys import Tables, quote
from retrain.config.resolve import as_tables, label_of
from retrain.config.schema import Config
from retrain.plan.estimate.history import History, RunTimes
from retrain.plan.estimate.money import Billed
from retrain.plan.estimate.workload import (
    ALONE,
    Crowding,
    Failures,
    Launching,
    Pilot,
    RunVariance,
    RunWork,
    StepCost,
    Workload,
    on_cores,
    run_variance,
)
from retrain.plan.matrix import Plan, RunPlan
from retrain.records.decision import HELD_OUT
from retrain.records.metrics import mean, median

RUN_TIMES_DIFFER = 0.08  # standard deviation between runs over their mean, guessed before any is measured

MatchedBy = Literal["same", "other condition", "other settings"]

# settings that determine step time; () means every key of the table
DECIDES: Mapping[str, tuple[str, ...]] = {
    "model": (),
    "training": ("batch_size", "group_size", "max_tokens", "updates_per_batch", "minibatches"),
    "data": ("task", "options"),
    "reward": (),
    "environment": ("environment", "options", "max_turns", "max_turn_tokens", "threads"),
    "backend": ("backend", "options"),
    "backpressure": ("enabled", "max_batch_size"),
}


@dataclass(frozen=True)
class ConditionSummary:
    """What is known about one condition's steps from earlier runs."""

    condition: str
    match: MatchedBy
    from_conditions: tuple[str, ...]
    differs: tuple[str, ...]  # settings that affect step time and differ, "key = theirs, not ours"
    runs: int
    steps: int
    is_finished: bool  # whether any run of this condition finished, with any settings
    median_step_time_s: float
    mean_step_time_s: float  # including the time between steps; without waits for permits
    permit_held_s: float
    max_token_hit_rate: float | None


@dataclass(frozen=True)
class ConditionTimes(ConditionSummary):
    """The same, with the single steps; times are those of a run alone."""

    sources: tuple[RunTimes, ...]  # the runs that it is measured by
    run_times_s: tuple[tuple[float, ...], ...]  # of each run
    calls_at_once: int
    billed: tuple[Billed, ...]  # of each run that counts tokens
    evaluations: Mapping[str, int]  # how often a run as planned is evaluated, by prefix of their columns

    @property
    def cost(self) -> StepCost:
        return StepCost(self.mean_step_time_s, self.permit_held_s, self.calls_at_once)

    def among(self, crowd: float) -> ConditionSummary:
        """Return the summary, with times `crowd` times as long."""
        summary = {each.name: getattr(self, each.name) for each in fields(ConditionSummary)}
        times = ("median_step_time_s", "mean_step_time_s", "permit_held_s")
        return ConditionSummary(**summary | {name: crowd * summary[name] for name in times})


@dataclass(frozen=True)
class Learned:
    """The input of an estimate, from earlier runs; times are those of a run alone."""

    conditions: Mapping[str, ConditionTimes]
    history: History
    permits_borne: int | None  # that the API sustained, if permits adapt; None if never at its limit
    crowding: Crowding  # slowdown of all of this by concurrent runs

    @cached_property
    def pilot(self) -> Pilot:
        """Step times by condition; of conditions that are measured by the same runs, only the first has any.

        So has none that is matched with another condition's runs, if others have their own.
        """
        with_runs = [c for c, m in self.conditions.items() if m.match != "other condition"]
        times = {
            c: list(chain.from_iterable(self.conditions[c].run_times_s))
            for c in with_runs or self.conditions
            if self._same_runs[c] == c
        }
        runs = {c: m.runs for c, m in self.conditions.items()}
        measured = self.run_variance
        variance = measured.variance if measured.freedom else RUN_TIMES_DIFFER**2
        return Pilot(times, runs=runs, same_runs=self._same_runs, run_variance=variance)

    @cached_property
    def run_variance(self) -> RunVariance:
        """How much runs of a condition differ beyond their steps."""
        return run_variance(m.run_times_s for c, m in self.conditions.items() if self._same_runs[c] == c)

    @cached_property
    def _same_runs(self) -> dict[str, str]:
        """Each condition's first one with the same runs, by its own where there is one."""
        sources = {c: tuple(map(id, m.sources)) for c, m in self.conditions.items()}
        firsts: dict[tuple[int, ...], str] = {}
        for condition in sorted(sources, key=lambda c: self.conditions[c].match == "other condition"):
            firsts.setdefault(sources[condition], condition)
        return {c: firsts[runs] for c, runs in sources.items()}


def crowding_of(plan: Plan, cores: float) -> Crowding:
    """Return the slowdown by concurrent runs, from the cores that workers share."""
    return on_cores(cores) if plan.shares_cores else ALONE


def learned_for(
    plan: Plan, history: History, cores: float, crowding: Crowding | None = None
) -> Learned | None:
    """Match a plan's conditions with earlier runs; None if there are none.

    Concurrent runs slow each other down by `crowding`; if that is None, as a calibration in the history
    measured it, else by the `cores` of this machine, where workers share them.

    A condition is matched with runs of the same settings: its own if there are any, else those of other
    conditions; failing that, with its own runs with other settings; else with all runs.
    """
    if not history.runs:
        return None
    crowding = crowding or history.crowding or crowding_of(plan, cores)
    history = history.alone(crowding)
    labels = {label_of(run.condition) for run in history.runs}
    # a sweep has thousands of conditions that no earlier run tells apart
    alike: dict[object, ConditionTimes] = {}
    defaults = as_tables(Config())
    conditions = {}
    for condition, run in plan.first_runs.items():
        kind = _kind_of(run, labels)
        if kind not in alike:
            alike[kind] = _times_of(run, history.runs, defaults)
        conditions[condition] = replace(alike[kind], condition=condition)
    backend = plan.runs[0].config.backend.backend
    same = (run for run in history.runs if run.tables.get("backend", {}).get("backend") == backend)
    borne = median(run.permits_borne for run in same)
    return Learned(conditions, history, None if borne is None else max(1, round(borne)), crowding)


def workload_of(plan: Plan, learned: Learned) -> Workload:
    """Return a plan as a workload to estimate."""
    config, history = plan.runs[0].config, learned.history
    lost_steps, retries = float(config.training.save_every), plan.campaign.retries
    launching = Launching(
        plan.workers,
        plan.campaign.stagger_seconds,
        (history.launch_s(plan.campaign.launcher) or 0.0) + (history.startup_s or 0.0),
        history.closing_s or 0.0,
        learned.permits_borne if plan.permits_adapt else plan.permits,
        Failures(history.failures_per_hour, lost_steps, retries=retries),
        learned.crowding,
    )
    costs = {label: times.cost for label, times in learned.conditions.items()}
    return Workload(tuple(RunWork(r.condition, r.max_steps) for r in plan.runs), costs, launching)


def _kind_of(run: RunPlan, labels: Collection[str]) -> object:
    """Return what decides how a condition is measured; `labels` are of earlier runs."""
    config, label = run.config, label_of(run.condition)
    training, tables = config.training, [vars(getattr(config, section)) for section in DECIDES]
    deciding = [
        table if not keys else [table[key] for key in keys]
        for table, keys in zip(tables, DECIDES.values(), strict=True)
    ]
    periods = training.max_steps, training.save_every, tuple(_evals_every(run).items())
    return repr(deciding), periods, label if label in labels else ""


def _times_of(run: RunPlan, runs: Sequence[RunTimes], defaults: Tables) -> ConditionTimes:
    ours = as_tables(run.config)
    compared = [(r, list(_differences(ours, r.tables, defaults))) for r in runs]
    alike = [(r, differs) for r, differs in compared if not differs]
    its = [(r, differs) for r, differs in alike or compared if _is_named(r, run.condition)]
    match: MatchedBy = "other settings" if not alike else "same" if its else "other condition"
    compared = its or alike or compared
    sources, differs = zip(*compared, strict=True)
    chosen = tuple(r.trained_for(run.config.training.updates_per_batch) for r in sources)
    by_run = tuple(r.step_times_s for r in chosen)
    times = list(chain.from_iterable(by_run))
    return ConditionTimes(
        condition=run.condition,
        match=match,
        from_conditions=tuple(dict.fromkeys(r.condition for r in chosen)),
        differs=tuple(dict.fromkeys(chain.from_iterable(differs))),
        runs=len(chosen),
        steps=len(times),
        is_finished=any(_is_named(r, run.condition) for r in runs if r.is_finished),
        median_step_time_s=statistics.median(times),
        mean_step_time_s=math.fsum(times) / len(times) + _beside_s(run, chosen),
        permit_held_s=statistics.fmean(r.parts.permit_held_s for r in chosen),
        max_token_hit_rate=mean(r.max_token_hit_rate for r in chosen),
        sources=sources,
        run_times_s=by_run,
        calls_at_once=round(statistics.median(r.parts.calls_at_once for r in chosen)),
        billed=tuple(r.billed for r in chosen if r.billed.steps),
        evaluations={
            name: max(0, run.max_steps - 1) // every + 1 if every else 1
            for name, every in _evals_every(run).items()
        },
    )


def _beside_s(run: RunPlan, runs: Sequence[RunTimes]) -> float:
    """Return the time beside a step: between two steps, and its share of evaluations and checkpoints."""
    periodic = [(run.config.training.save_every, [past.checkpoint_s for past in runs])]
    for name, every in _evals_every(run).items():
        periodic.append((every, [past.evals_s[name] for past in runs if name in past.evals_s] or [0.0]))
    beside_s = [statistics.fmean(past.between_s for past in runs)]
    for every, seconds in periodic:
        if every and run.max_steps:  # the last occurrence counts as closing
            beside_s.append(statistics.fmean(seconds) * ((run.max_steps - 1) // every / run.max_steps))
    return math.fsum(beside_s)


def _evals_every(run: RunPlan) -> Mapping[str, int]:
    """Return the steps between evaluations of each kind, by what their columns begin with; 0: at the end."""
    every = {f"{HELD_OUT}{table.name}_": table.every for table in run.config.eval.tables}
    return {HELD_OUT: run.config.training.eval_every, **every}


def _is_named(run: RunTimes, condition: str) -> bool:
    """Whether a run belongs to a condition, whose label is the same."""
    return _label(run.condition) == _label(condition)


_label = cache(label_of)  # each condition of a sweep is compared with each run


def _differences(ours: Tables, theirs: Tables, defaults: Tables) -> Iterator[str]:
    """Iterate over the settings that differ; `defaults` are of keys that `theirs` did not have yet."""
    for section, keys in DECIDES.items():
        mine, other = ours.get(section, {}), defaults[section] | theirs.get(section, {})
        for key in keys or sorted(mine):
            if mine.get(key) != other.get(key):
                yield f"{section}.{key} = {quote(other.get(key))}, not {quote(mine.get(key))}"
