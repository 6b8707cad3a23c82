"""A plan's wall time from earlier runs: the rule of thumb and the simulated makespan."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from retrain.plan.durations import about
from retrain.plan.estimate import Makespan, estimate, rule_of_thumb_s
from retrain.plan.estimate.bootstrap import Tail
from retrain.plan.estimate.history import History
from retrain.plan.estimate.learned import Learned, Match, Measured, workload_of
from retrain.plan.estimate.limits import Change, Limit
from retrain.plan.estimate.simulation import quantile
from retrain.plan.matrix import Plan
from retrain.plan.warnings import shares_cores

ON_THIS_MACHINE = ("local", "inline")  # launchers that start a worker immediately
TELLING = 4  # earlier campaigns needed for a P90 of effects that step times do not show
RULE_OF_THREE = 3  # an event not seen in n steps is rarer than 3 in n, with 95 % confidence


@dataclass(frozen=True)
class MeasuredCondition:
    """Step times of one condition, and the runs that they are from."""

    condition: str
    match: Match
    from_conditions: tuple[str, ...]
    differs: tuple[str, ...]
    runs: int
    steps: int
    median_step_time_s: float
    mean_step_time_s: float  # including the time between steps; without waits for permits
    permit_held_s: float
    max_token_hit_rate: float | None


@dataclass(frozen=True)
class WallTime:
    """An estimate from earlier runs."""

    median_step_time_s: float
    measured_runs: int
    measured_steps: int
    startup_s: float | None
    closing_s: float | None
    failures_per_hour: float
    rule_of_thumb_s: float
    p50_s: float
    p90_s: float
    tail: Tail
    waves: int
    limited_by: Limit
    permit_wait_fraction: float
    changes: tuple[Change, ...]  # the best first
    conditions: tuple[MeasuredCondition, ...]
    actual_over_p50: tuple[float, ...]  # of earlier finished campaigns with a forecast
    notes: tuple[str, ...]  # what the estimate leaves out

    @property
    def holds_permits(self) -> bool:
        """Whether steps make calls that hold permits."""
        return any(condition.permit_held_s for condition in self.conditions)


def wall_time(plan: Plan, learned: Learned | None, history: History, cores: float) -> WallTime | None:
    """Estimate a plan's wall time from earlier runs; None without any.

    Args:
        plan: the plan.
        learned: the costs of its runs.
        history: the runs that these costs are from.
        cores: CPU cores of this machine, the most workers advised for a backend that computes on them.
    """
    if learned is None:
        return None
    found = estimate(workload_of(plan, learned), learned.pilot)
    actual = tuple(e.actual_s / e.p50_s for e in history.expectations if e.actual_s and e.p50_s)
    p90_s = max(found.p90_s, found.p50_s * quantile(actual, 0.9)) if len(actual) >= TELLING else found.p90_s
    measured = learned.conditions.values()
    crowd = learned.crowding.of(min(plan.workers, len(plan.runs)))
    medians = [crowd * learned.conditions[run.condition].median_step_time_s for run in plan.runs]
    return WallTime(
        median_step_time_s=statistics.median(medians),
        measured_runs=len(history.runs),
        measured_steps=learned.pilot.steps,
        startup_s=learned.startup_s and crowd * (learned.startup_s + (learned.launch_s or 0.0)),
        closing_s=learned.closing_s and crowd * learned.closing_s,
        failures_per_hour=learned.failures_per_hour,
        rule_of_thumb_s=rule_of_thumb_s(plan.total_steps, statistics.median(medians), plan.workers),
        p50_s=found.p50_s,
        p90_s=p90_s,
        tail=found.tail,
        waves=found.waves,
        limited_by=found.limited_by,
        permit_wait_fraction=found.permit_wait_fraction,
        changes=tuple(_advice(plan, found, cores)),
        conditions=tuple(_shown(m, crowd) for m in measured),
        actual_over_p50=actual,
        notes=(*_notes(plan, learned, found), *_wider(found, p90_s), *_on_few_cores(plan, cores, history)),
    )


def _advice(plan: Plan, found: Makespan, cores: float) -> Iterator[Change]:
    on_cores = shares_cores(plan)
    for change in found.changes:
        if change.limit == "permits" and plan.runs[0].config.backend.adapts_permits:
            continue  # the API's limit, which no setting raises
        if change.limit == "workers":
            if on_cores and found.next_workers > cores:
                continue  # sharing cores would slow steps down by more than it gains
            if not plan.campaign.parallel:
                change = replace(change, setting=f"campaign.parallel = true, {change.setting}")
        yield change


def _wider(found: Makespan, p90_s: float) -> Iterator[str]:
    if p90_s > found.p90_s:
        yield (
            f"P90 would be {about(found.p90_s)} from step times alone; earlier campaigns here took longer "
            "than their step times predicted"
        )


def _on_few_cores(plan: Plan, cores: float, history: History) -> Iterator[str]:
    measured = {run.at_a_time for run in history.runs if run.at_a_time}
    if shares_cores(plan) and measured and plan.workers > max(cores, *measured):
        yield (
            f"measured with at most {max(measured)} at a time: with {plan.workers} on {cores:g} CPU cores "
            "steps are assumed to slow down as workers share cores"
        )


def _shown(measured: Measured, crowd: float) -> MeasuredCondition:
    """Return a condition's step times with all workers busy."""
    return MeasuredCondition(
        measured.condition,
        measured.match,
        measured.from_conditions,
        measured.differs,
        measured.runs,
        measured.steps,
        crowd * measured.median_step_time_s,
        crowd * measured.cost.seconds,
        crowd * measured.cost.permit_s,
        measured.max_token_hit_rate,
    )


def _notes(plan: Plan, learned: Learned, found: Makespan) -> Iterator[str]:
    steps = learned.pilot.steps
    if found.tail == "heavy":
        yield f"single steps take far longer than the mean: {steps} steps are too few for a reliable P90"
    if found.tail == "short":
        yield (
            f"{steps} steps were measured: slowdowns rarer than 1 step in "
            f"{max(1, steps // RULE_OF_THREE)} may not have been seen, so P90 may be too low"
        )
    for measured in learned.conditions.values():
        if measured.match == "other condition":
            others = ", ".join(measured.from_conditions)
            yield f"{measured.condition} was never measured itself; the step times of {others} are used"
        elif measured.match == "other settings":
            yield f"{measured.condition} was measured with other settings: {'; '.join(measured.differs)}"
    if plan.runs[0].config.backend.adapts_permits:
        yield 'max_concurrent = "auto": ' + (
            "no earlier run reached the API's limit, so waits for permits are not included"
            if learned.permits_borne is None
            else f"{learned.permits_borne} permits are assumed, which the API sustained in earlier runs"
        )
    if learned.launch_s is None and plan.campaign.launcher not in ON_THIS_MACHINE:
        yield (
            f'no earlier campaign ran with launcher = "{plan.campaign.launcher}": '
            "the time from submission to start is not included"
        )
    if learned.startup_s is None:
        yield "a run's start-up time is unknown and not included"
    if learned.closing_s is None:
        yield "no run has ended yet: the final evaluation and checkpoint are not included"
