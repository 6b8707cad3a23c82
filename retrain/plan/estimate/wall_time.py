"""A plan's wall time from earlier runs: the rule of thumb and the simulated makespan."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from retrain.config.launching import runs_here
from retrain.plan.estimate import Change, Makespan, estimate_workload, rule_of_thumb_s
from retrain.plan.estimate.learned import RUN_TIMES_DIFFER, ConditionSummary, Learned, workload_of
from retrain.plan.estimate.simulation import Simulation, ninth_decile, widened
from retrain.plan.estimate.workload import Workload
from retrain.plan.matrix import Plan
from retrain.records.text import about, first_of

NAMED_AT_MOST = 3  # conditions, in one note
MOST_NOTES = 8  # of conditions that were not measured as planned
MOST_DIFFERENCES = 6  # settings, in one note
TELLING = 4  # earlier campaigns needed for a P90 of effects that step times do not show
RULE_OF_THREE = 3  # an event not seen in n steps is rarer than 3 in n, with 95 % confidence


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
    if plan.permits_adapt and learned.permits_borne is None:
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
        changes=tuple(_advice(plan, estimate, cores)),
    )
    return WallTime(
        **vars(makespan),
        median_step_time_s=median_s,
        measured_runs=len(sources),
        measured_steps=len(steps_s),
        startup_s=startup_s and crowd * (startup_s + (launch_s or 0.0)),
        closing_s=closing_s and crowd * closing_s,
        failures_per_hour=alone.failures_per_hour,
        conditions=tuple(measured.among(crowd) for measured in learned.conditions.values()),
        actual_over_p50=actual,
        slowest_p50_s=slowest_p50_s,
        slowdown=slowdown,
        notes=(
            *_doubts(learned, estimate),
            *_left_out(plan, learned, cores, slowdown, estimate.p90_s, p90_s),
        ),
    )


def _advice(plan: Plan, estimate: Makespan, cores: float) -> Iterator[Change]:
    for change in estimate.changes:
        if change.limit == "permits" and plan.permits_adapt:
            continue  # the API's limit, which no setting raises
        if change.limit == "workers":
            more = math.ceil(estimate.runs / max(1, estimate.waves - 1))  # the fewest that save a wave
            if plan.shares_cores and more > cores:
                continue  # sharing cores would slow steps down by more than it gains
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
            f"no earlier run reached the API's limit, so P50 goes from unlimited permits to the "
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
    measured = max((run.at_a_time for run in alone.runs), default=0)
    if plan.shares_cores and slowdown is None and measured and plan.workers > max(cores, measured):
        yield (
            f"measured with at most {measured} at a time: with {plan.workers} on {cores:g} CPU cores "
            "steps are assumed to slow down as workers share cores"
        )
