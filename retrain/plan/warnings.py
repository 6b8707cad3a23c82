"""Warnings about a plan: settings that cost time or have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from retrain import registry
from retrain.config.schema import Campaign, Config, RateLimiter
from retrain.plan.matrix import Plan, RunPlan

GENEROUS = 8  # times the longest answer: more than any completion needs
CPU_BACKENDS = ("numpy",)


def answers_alone(config: Config) -> bool:
    """Whether a completion is only the answer; a language model reasons first."""
    return config.backend.backend in CPU_BACKENDS


def computes_here(config: Config) -> bool:
    """Whether steps compute on this machine's cores; steps with a simulated API mostly wait."""
    name = config.backend.backend
    calls = registry.hook("backends", name, "takes_permits")
    return name in CPU_BACKENDS and not (calls and calls(config.backend.options))


def shares_cores(plan: Plan) -> bool:
    """Whether a plan's workers compute side by side on this machine."""
    return plan.campaign.launcher == "local" and computes_here(plan.runs[0].config)


def warnings_of(plan: Plan, longest_answers: Mapping[str, int], cores: float) -> Iterator[str]:
    """Iterate over the warnings, one line each."""
    yield from _too_few_cores(plan, cores)
    yield from _room_to_ramble(plan, longest_answers)
    yield from _without_effect(plan)
    yield from _never_trains(plan)
    yield from _different_batches(plan)
    yield from dict.fromkeys(line for run in plan.first_runs().values() for line in _of_backend(run))
    yield from _queue_for_permits(plan)


def _too_few_cores(plan: Plan, cores: float) -> Iterator[str]:
    if plan.workers > cores and shares_cores(plan):
        yield (
            f"{plan.workers} workers share {cores:g} CPU cores: steps will be slower than measured alone; "
            f"campaign.max_workers = {max(1, int(cores))} gives each its own core"
        )


def _room_to_ramble(plan: Plan, longest_answers: Mapping[str, int]) -> Iterator[str]:
    for label, run in plan.first_runs().items():
        need = longest_answers.get(label, 0)
        allowed = run.config.training.max_tokens
        if need and run.max_steps and answers_alone(run.config) and allowed > GENEROUS * (need + 1):
            yield (
                f"{label}: max_tokens = {allowed}, but the longest answer has {need} "
                f"characters, and every token costs time: training.max_tokens = {2 * (need + 1)} is enough"
            )


def _without_effect(plan: Plan) -> Iterator[str]:
    if plan.campaign.max_workers > 1 and not plan.campaign.parallel:
        yield f"max_workers = {plan.campaign.max_workers} has no effect without campaign.parallel = true"
    yield from _of_launcher(plan.campaign)
    if any(_has_idle_rate_limiter(run) for run in plan.runs):
        yield (
            "[rate_limiter] has no effect with max_staleness = 0: sampling and training take turns; "
            "set max_staleness = 1 or more to overlap them"
        )


def _never_trains(plan: Plan) -> Iterator[str]:
    if any(run.config.throttle.enabled and run.config.throttle.min_level == "paused" for run in plan.runs):
        yield ('throttle.min_level = "paused" never trains, even on an idle machine; use "minimal" or less')


def _different_batches(plan: Plan) -> Iterator[str]:
    if len(plan.conditions) > 1 and any(_may_change_batch(run) for run in plan.runs):
        yield (
            "back pressure or the load throttle may give conditions different batch sizes, which biases the "
            'comparison; control = "microbatch" keeps the optimizer\'s batch the same'
        )


def _queue_for_permits(plan: Plan) -> Iterator[str]:
    backend = plan.runs[0].config.backend
    if plan.workers > backend.first_permits and not backend.adapts_permits:
        yield f"{plan.workers} workers share {backend.first_permits} permits: calls queue, which is fine"


def _of_launcher(campaign: Campaign) -> Iterator[str]:
    if campaign.launcher != "inline":
        return
    if campaign.parallel:
        yield 'parallel has no effect with launcher = "inline": runs take turns in this process'
    for key in ("run_timeout", "stall_timeout"):
        if getattr(campaign, key):
            yield f'{key} has no effect with launcher = "inline": no other process watches the time'


def _of_backend(run: RunPlan) -> list[str]:
    advise = registry.hook("backends", run.config.backend.backend, "advise_run")
    return list(advise(run.config)) if advise else []


def _may_change_batch(run: RunPlan) -> bool:
    pressure, throttle = run.config.backpressure, run.config.throttle
    return (pressure.enabled and pressure.control == "batch") or (
        throttle.enabled and throttle.control == "batch"
    )


def _has_idle_rate_limiter(run: RunPlan) -> bool:
    return run.config.rate_limiter.max_staleness == 0 and run.config.rate_limiter != RateLimiter()
