"""What a file would do, how long it would take, and what to think about first."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from retrain.config.schema import Config, RateLimiter
from retrain.plan.estimate import estimate_makespan, rule_of_thumb_s
from retrain.plan.limits import Limit
from retrain.plan.matrix import Plan, RunPlan
from retrain.plan.preflight import TaskFacts

GENEROUS = 8  # times the longest answer: more room than any completion needs
CPU_BACKENDS = ("numpy",)
SECTIONS = tuple(f.name for f in fields(Config) if f.name not in ("campaign", "logging", "run"))


@dataclass(frozen=True)
class ConditionPlan:
    """One condition's row of the run matrix."""

    condition: str
    seeds: tuple[int, ...]
    max_steps: int
    batch_size: int
    group_size: int
    concurrency: int  # rollouts sampled per step
    max_tokens: int
    backend: str
    task: str
    differs: tuple[str, ...]  # keys whose value is not the first condition's


@dataclass(frozen=True)
class WallTime:
    """An estimate from earlier runs' step times."""

    median_step_time_s: float
    measured_runs: int
    rule_of_thumb_s: float
    simulated_s: float
    waves: int
    limited_by: Limit


@dataclass(frozen=True)
class Explanation:
    """Everything that `retrain explain` shows."""

    name: str
    conditions: tuple[ConditionPlan, ...]
    total_runs: int
    total_campaign_steps: int
    effective_parallelism: int
    permits: int
    launcher: str
    log_dir: str
    wall_time: WallTime | None
    pilot_command: str  # measures a step time, when none is known
    warnings: tuple[str, ...]


def explain_plan(
    plan: Plan,
    facts: Mapping[str, TaskFacts],
    step_times_s: Mapping[str, list[float]],
    cores: float,
    file_name: str,
) -> Explanation:
    """Describe a plan.

    Args:
        plan: what would run.
        facts: each condition's task.
        step_times_s: median step times of earlier runs, by condition; empty if none is known.
        cores: CPU cores that this machine really gives.
        file_name: for the pilot's command.
    """
    first = _first_runs(plan)
    return Explanation(
        name=plan.name,
        conditions=tuple(_condition(run, plan, first[plan.conditions[0]]) for run in first.values()),
        total_runs=len(plan.runs),
        total_campaign_steps=plan.total_steps,
        effective_parallelism=plan.workers,
        permits=plan.runs[0].config.backend.first_permits,
        launcher=plan.campaign.launcher,
        log_dir=str(plan.log_dir),
        wall_time=_wall_time(plan, step_times_s),
        pilot_command=_pilot_command(plan, file_name),
        warnings=tuple(_warnings(plan, facts, cores)),
    )


def _first_runs(plan: Plan) -> dict[str, RunPlan]:
    first: dict[str, RunPlan] = {}
    for run in plan.runs:
        first.setdefault(run.condition, run)
    return first


def _condition(run: RunPlan, plan: Plan, base: RunPlan) -> ConditionPlan:
    training = run.config.training
    return ConditionPlan(
        condition=run.condition,
        seeds=tuple(r.seed for r in plan.runs if r.condition == run.condition),
        max_steps=training.max_steps,
        batch_size=training.batch_size,
        group_size=training.group_size,
        concurrency=training.batch_size * training.group_size,
        max_tokens=training.max_tokens,
        backend=run.config.backend.backend,
        task=run.config.data.task,
        differs=tuple(_differences(run, base)),
    )


def _differences(run: RunPlan, base: RunPlan) -> Iterator[str]:
    for section in SECTIONS:
        ours, theirs = vars(getattr(run.config, section)), vars(getattr(base.config, section))
        yield from (f"{section}.{key} = {value!r}" for key, value in ours.items() if value != theirs[key])


def _wall_time(plan: Plan, step_times_s: Mapping[str, list[float]]) -> WallTime | None:
    known = [seconds for times in step_times_s.values() for seconds in times]
    if not known:
        return None
    median = statistics.median(known)
    of = {label: statistics.fmean(times) for label, times in step_times_s.items()}
    seconds = [run.max_steps * of.get(run.condition, median) for run in plan.runs]
    simulated = estimate_makespan(seconds, plan.workers, stagger_s=plan.campaign.stagger_seconds)
    return WallTime(
        median_step_time_s=median,
        measured_runs=len(known),
        rule_of_thumb_s=rule_of_thumb_s(plan.total_steps, median, plan.workers),
        simulated_s=simulated.p50_s,
        waves=simulated.waves,
        limited_by=simulated.limited_by,
    )


def _pilot_command(plan: Plan, file_name: str) -> str:
    steps = "campaign.max_steps=20" if not plan.is_single_run else "training.max_steps=20"
    return f"retrain {file_name} --set {steps} && retrain explain {file_name} --from {plan.log_dir}"


def _warnings(plan: Plan, facts: Mapping[str, TaskFacts], cores: float) -> Iterator[str]:
    backend = plan.runs[0].config.backend
    if backend.backend in CPU_BACKENDS and plan.workers > cores:
        yield (
            f"{plan.workers} workers share {cores:g} CPU cores: steps will be slower than measured alone; "
            f"campaign.max_workers = {max(1, int(cores))} would keep them apart"
        )
    for label, run in _first_runs(plan).items():
        need = facts[label].longest_answer if label in facts else 0
        if need and run.max_steps and run.config.training.max_tokens > GENEROUS * (need + 1):
            yield (
                f"{label}: max_tokens = {run.config.training.max_tokens}, but the longest answer has {need} "
                f"characters; rambling is paid for: training.max_tokens = {2 * (need + 1)} would do"
            )
    if plan.campaign.max_workers > 1 and not plan.campaign.parallel:
        yield f"max_workers = {plan.campaign.max_workers} has no effect without campaign.parallel = true"
    if any(_has_idle_rate_limiter(run) for run in plan.runs):
        yield (
            "[rate_limiter] has no effect with max_staleness = 0: sampling and training take turns; "
            "set max_staleness = 1 or more to overlap them"
        )
    if len(plan.conditions) > 1 and any(_may_change_batch(run) for run in plan.runs):
        yield (
            "back pressure or the load throttle may give conditions different batches: they would differ in "
            'more than you set; control = "microbatch" keeps the optimizer\'s batch the same'
        )
    if plan.workers > backend.first_permits and not backend.adapts_permits:
        yield (
            f"{plan.workers} workers share {backend.first_permits} permits: fine, they queue for API calls"
        )


def _may_change_batch(run: RunPlan) -> bool:
    pressure, throttle = run.config.backpressure, run.config.throttle
    return (pressure.enabled and pressure.control == "batch") or (
        throttle.enabled and throttle.control == "batch"
    )


def _has_idle_rate_limiter(run: RunPlan) -> bool:
    return run.config.rate_limiter.max_staleness == 0 and run.config.rate_limiter != RateLimiter()
