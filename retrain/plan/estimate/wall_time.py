"""A plan's wall time from earlier runs that match its conditions: rule of thumb and simulated makespan."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import chain, islice
from typing import Literal

from retrain.config.keys import Tables, quote
from retrain.config.resolve import as_tables, label_of, runs_here
from retrain.config.schema import Config
from retrain.plan.estimate import Change, Makespan, estimate_workload, rule_of_thumb_s
from retrain.plan.estimate.history import MOST_ROWS, History, RunTimes
from retrain.plan.estimate.money import Billed
from retrain.plan.estimate.simulation import Simulation, ninth_decile, widened
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
from retrain.records.text import about, first_of

RUN_TIMES_DIFFER = 0.08  # standard deviation between runs over their mean, guessed before any is measured
NAMED_AT_MOST = 3  # conditions, in one note
MOST_NOTES = 8  # of conditions that were not measured as planned
MOST_DIFFERENCES = 6  # settings, in one note
TELLING = 4  # earlier campaigns needed for a P90 of effects that step times do not show
RULE_OF_THREE = 3  # an event not seen in n steps is rarer than 3 in n, with 95 % confidence

MatchedBy = Literal["same", "other condition", "other settings"]

# settings that determine step time; () means every key of the table
DECIDES: Mapping[str, tuple[str, ...]] = {
    "model": (),
    "training": ("batch_size", "group_size", "max_tokens", "updates_per_batch", "minibatches"),
    "data": ("task", "options", "curriculum", "curriculum_params", "refill", "refill_most"),
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
    permits_stay: bool  # as no earlier run's backend reported a call, so that "auto" changed nothing
    crowding: Crowding  # slowdown of all of this by concurrent runs
    # evaluations that `[decision]` adds at the end of a run on average, by prefix of their columns
    further: Mapping[str, float] = field(default_factory=dict)

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
    return on_cores(room) if (room := plan.room(cores)) else ALONE


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
    history = history.alone(crowding, plan.devices_each)
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
    used = {id(run): run for measured in conditions.values() for run in measured.sources}
    history = replace(history, sources=tuple(used.values()))
    backend = plan.runs[0].config.backend.backend
    same = [run for run in history.runs if run.tables.get("backend", {}).get("backend") == backend]
    borne = median(run.permits_borne for run in same)
    adapted = [run.permits_adapt for run in same if run.permits_adapt is not None]
    stay = bool(adapted) and not any(adapted)
    return Learned(conditions, history, None if borne is None else max(1, round(borne)), stay, crowding)


def workload_of(plan: Plan, learned: Learned) -> Workload:
    """Return a plan as a workload to estimate."""
    config, history = plan.runs[0].config, learned.history
    lost_steps, retries = float(config.training.save_every), plan.campaign.retries
    at_start_s = _at_start_s(plan, history)
    further_s = math.fsum(
        times * (history.evaluation_s(prefix) or 0.0) for prefix, times in learned.further.items()
    )
    launching = Launching(
        plan.workers,
        plan.campaign.stagger_seconds,
        (history.launch_s(plan.campaign.launcher) or 0.0) + (history.startup_s or 0.0) + at_start_s,
        (history.closing_s or 0.0) + further_s,
        learned.permits_borne if _adapts(plan, learned) else plan.permits,
        Failures(history.failures_per_hour, lost_steps, retries=retries),
        learned.crowding,
    )
    costs = {label: times.cost for label, times in learned.conditions.items()}
    return Workload(tuple(RunWork(r.condition, r.max_steps) for r in plan.runs), costs, launching)


def _at_start_s(plan: Plan, history: History) -> float:
    """Return the time of the warm-up and of evaluations before the first step, of a run on average.

    Those of its seed that start alike, as far as they run at the same time, wait for the one that makes it.
    """
    makers_of = Counter[str]()
    for counts in plan.evaluations_at_start.values():
        makers_of.update(counts)
    once_s = [(sum(plan.warm_ups.values()), mean(history.values(lambda run: run.warm_up_s)))]
    for name, makers in makers_of.items():
        prefix = f"{HELD_OUT}{name}_" if name else HELD_OUT
        once_s.append((makers, history.evaluation_s(prefix)))
    each_s = (
        min(1.0, makers * plan.workers / len(plan.runs)) * (seconds or 0.0) for makers, seconds in once_s
    )
    return math.fsum(each_s)


def _adapts(plan: Plan, learned: Learned) -> bool:
    return plan.permits_adapt and not learned.permits_stay


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
    compared = [(r, list(differences(ours, r.tables, defaults))) for r in runs]
    alike = [(r, differs) for r, differs in compared if not differs]
    its = [(r, differs) for r, differs in alike or compared if _is_named(r, run.condition)]
    match: MatchedBy = "other settings" if not alike else "same" if its else "other condition"
    compared = its or alike or compared
    sources, differs = zip(*compared, strict=True)
    training, data = run.config.training, run.config.data
    chosen = tuple(r.refilled_with(data.most_refill).trained_for(training.updates_per_batch) for r in sources)
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


def differences(ours: Tables, theirs: Tables, defaults: Tables) -> Iterator[str]:
    """Iterate over the settings that differ; `defaults` are of keys that `theirs` did not have yet."""
    for section, keys in DECIDES.items():
        mine, other = ours.get(section, {}), defaults[section] | theirs.get(section, {})
        for key in keys or sorted(mine):
            if mine.get(key) != other.get(key):
                yield f"{section}.{key} = {quote(other.get(key))}, not {quote(mine.get(key))}"


@dataclass(frozen=True)
class WallTime(Makespan):
    """An estimate from earlier runs; times of conditions are those with all workers busy."""

    median_step_time_s: float  # of all measured steps, as recorded
    measured_runs: int  # that it is estimated from
    measured_steps: int  # of these runs
    startup_s: float | None
    closing_s: float | None
    failures_per_hour: float
    conditions: tuple[ConditionSummary, ...]
    actual_over_p50: tuple[float, ...]  # of earlier finished campaigns with a forecast
    slowest_p50_s: float | None  # if permits adapt to a limit not known: with those that it starts with
    permits_stay: bool  # whatever the backend's file says, its earlier runs reported no call
    slowdown: float | None  # of a step with all workers, over one alone, where a calibration measured it
    notes: tuple[str, ...]  # what the estimate leaves out

    @property
    def holds_permits(self) -> bool:
        return any(condition.permit_held_s for condition in self.conditions)


def forecast(workload: Workload, learned: Learned, seed: int = 0) -> Makespan:
    """Estimate a workload, with what earlier runs leave open in P90.

    That is the drift of the pace that all runs share, and how much runs differ, which a few do not show.
    """
    estimate, p90_s = estimate_workload(workload, learned.pilot, seed), 0.0
    if learned.run_variance.freedom:
        cautious = replace(learned.pilot, run_variance=learned.run_variance.expected(RUN_TIMES_DIFFER))
        p90_s = ninth_decile(Simulation(workload, cautious, seed).sample())
    return replace(
        estimate, p90_s=widened(estimate.p50_s, max(estimate.p90_s, p90_s), learned.crowding.drift)
    )


def wall_time(plan: Plan, learned: Learned, cores: float) -> WallTime:
    """Estimate a plan's wall time from earlier runs.

    More workers than `cores` are not advised for a backend that computes on them.
    """
    workload, slowest_p50_s = workload_of(plan, learned), None
    estimate = forecast(workload, learned)
    if _adapts(plan, learned) and learned.permits_borne is None:
        few = replace(workload, launching=replace(workload.launching, permits=plan.permits))
        cautious = forecast(few, learned)
        if cautious.permit_wait_fraction > 0:
            slowest_p50_s = cautious.p50_s
        estimate = replace(estimate, p90_s=max(estimate.p90_s, cautious.p90_s))
    alone = learned.history
    actual = tuple(e.actual_s / e.p50_s for e in alone.expectations if e.actual_s and e.p50_s)
    p90_s = (
        max(estimate.p90_s, estimate.p50_s * ninth_decile(actual))
        if len(actual) >= TELLING
        else estimate.p90_s
    )
    at_a_time, measured = min(plan.workers, len(plan.runs)), alone.crowding
    crowd, slowdown = learned.crowding.of(at_a_time), None
    if measured is not None and at_a_time <= measured.points[-1][0]:
        slowdown = measured.of(at_a_time)
    startup_s, closing_s, launch_s = alone.startup_s, alone.closing_s, alone.launch_s(plan.campaign.launcher)
    sources = {id(run): run for measured in learned.conditions.values() for run in measured.sources}
    steps_s = [seconds for run in sources.values() for seconds in run.whole_step_times_s]
    median_s = statistics.median(steps_s)
    makespan = replace(
        estimate,
        p90_s=p90_s,
        rule_of_thumb_s=rule_of_thumb_s(plan.total_steps, median_s, plan.workers),
        changes=tuple(_advice(plan, learned, estimate, cores)),
    )
    return WallTime(
        **vars(makespan),
        median_step_time_s=median_s,
        measured_runs=len(sources),
        measured_steps=len(steps_s),
        startup_s=startup_s and crowd * (startup_s + (launch_s or 0.0) + _at_start_s(plan, alone)),
        closing_s=closing_s and crowd * closing_s,
        failures_per_hour=alone.failures_per_hour,
        conditions=tuple(measured.among(crowd) for measured in learned.conditions.values()),
        actual_over_p50=actual,
        slowest_p50_s=slowest_p50_s,
        permits_stay=learned.permits_stay,
        slowdown=slowdown,
        notes=(
            *_doubts(learned, estimate),
            *_left_out(plan, learned, cores, slowdown, estimate.p90_s, p90_s),
        ),
    )


def _advice(plan: Plan, learned: Learned, estimate: Makespan, cores: float) -> Iterator[Change]:
    for change in estimate.changes:
        if change.limit == "permits" and _adapts(plan, learned):
            continue  # the API's limit, which no setting raises
        if change.limit == "workers":
            more = math.ceil(estimate.runs / max(1, estimate.waves - 1))  # the fewest that save a wave
            if (room := plan.room(cores)) and more > room:
                continue  # sharing devices or cores would slow steps down by more than it gains
            if not plan.campaign.parallel:
                change = replace(change, setting=f"campaign.parallel = true, {change.setting}")
        yield change


def _doubts(learned: Learned, estimate: Makespan) -> Iterator[str]:
    steps = learned.pilot.steps
    if estimate.tail == "heavy":
        yield f"single steps take far longer than the mean: {steps} steps are too few for a reliable P90"
    if estimate.tail == "short":
        yield (
            f"{steps} steps were measured: slowdowns rarer than 1 step in "
            f"{max(1, steps // RULE_OF_THREE)} may not have been seen, so P90 may be too low"
        )
    if not learned.run_variance.freedom:
        yield (
            "no condition was measured by two runs, so how much runs differ is not known: P90 is wide, as if "
            f"their mean step times had a standard deviation of {RUN_TIMES_DIFFER:.0%}"
        )
    borrowed: dict[str, list[str]] = {}  # reason -> conditions
    for measured in learned.conditions.values():
        if measured.match == "other condition":
            others = first_of(measured.from_conditions, NAMED_AT_MOST)
            reason = f"never measured; the step times of {others} are used"
        elif measured.match == "other settings":
            reason = f"measured with other settings: {'; '.join(measured.differs[:MOST_DIFFERENCES])}"
            if len(measured.differs) > MOST_DIFFERENCES:
                reason += f" and {len(measured.differs) - MOST_DIFFERENCES} more"
        else:
            continue
        borrowed.setdefault(reason, []).append(measured.condition)
    for reason, conditions in islice(borrowed.items(), MOST_NOTES):
        if len(conditions) == 1:
            yield f"{conditions[0]} was {reason.replace('never measured;', 'never measured itself;')}"
        else:
            yield f"{first_of(conditions, NAMED_AT_MOST)} were {reason}"
    if len(borrowed) > MOST_NOTES:
        more = sum(map(len, list(borrowed.values())[MOST_NOTES:]))
        yield f"{more} more conditions were not measured with these settings: see conditions in --json"


def _left_out(
    plan: Plan, learned: Learned, cores: float, slowdown: float | None, of_steps_p90_s: float, p90_s: float
) -> Iterator[str]:
    if plan.permits_adapt:
        yield 'max_concurrent = "auto": ' + (
            f"permits stay at {plan.permits}, as the backend reported no call in earlier runs; set a number"
            if learned.permits_stay
            else f"no earlier run reached the API's limit, so P50 goes from unlimited permits to the "
            f"{plan.permits} that it starts with, as if their number never grew; P90 is that of the latter"
            if learned.permits_borne is None
            else f"{learned.permits_borne} permits are assumed, which the API sustained in earlier runs"
        )
    alone = learned.history
    if alone.launch_s(plan.campaign.launcher) is None and not runs_here(plan.campaign):
        yield (
            f'no earlier campaign ran with launcher = "{plan.campaign.launcher}": '
            "the time from submission to start is not included"
        )
    if alone.startup_s is None:
        yield "a run's start-up time is unknown and not included"
    if alone.closing_s is None:
        yield "no run has ended yet: the final evaluation and checkpoint are not included"
    if p90_s > of_steps_p90_s:
        yield (
            f"P90 would be {about(of_steps_p90_s)} from step times alone; earlier campaigns here took longer "
            "than their step times predicted"
        )
    early = {}  # conditions whose batches are refilled, with the steps of a run that were measured
    for name, run in plan.first_runs.items():
        steps = max((len(source.step_times_s) for source in learned.conditions[name].sources), default=0)
        if run.config.data.most_refill and 2 * steps < min(run.max_steps, MOST_ROWS):
            early[name] = steps
    if early:
        yield (
            f"{first_of([*early], NAMED_AT_MOST)}: at most {max(early.values())} steps of a run measured; "
            "groups that teach nothing become fewer or more as a policy learns: so do refilled batches, "
            "their time and their cost"
        )
    measured = max((run.at_a_time for run in alone.runs), default=0)
    if plan.shares_cores and slowdown is None and measured and plan.workers > max(cores, measured):
        yield (
            f"measured with at most {measured} at a time: with {plan.workers} on {cores:g} CPU cores "
            "steps are assumed to slow down as workers share cores"
        )
