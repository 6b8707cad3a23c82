"""What a plan's author should know: settings that cost time or have no effect, and conditions alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from retrain.backends import plugin_of
from retrain.base import registry
from retrain.config.digest import digest
from retrain.config.resolve import by_source, plays_episodes, unused_keys
from retrain.config.schema import CampaignSection, Config, RateLimiterSection
from retrain.plan.matrix import Plan, RunPlan
from retrain.records.text import first_of

if TYPE_CHECKING:
    from retrain.plan.preflight import Checked

GENEROUS = 8  # times the longest answer: more than any completion needs
CLIPPED_LOSSES = {"ppo": (0.2, 0.2), "cispo": (1.0, 4.0)}  # name -> bounds of the ratio, as published
NAMED = 3  # conditions of a line
ROUNDING = 0.01  # how far rounding moves a token's ratio from 1, at most
BOUNDS = ("clip_low", "clip_high")


def notes_of(plan: Plan, checked: Checked) -> Iterator[str]:
    """Iterate over what a plan's author should know, one line each: `explain` shows it, and so does `run`."""
    yield from warnings_of(plan, checked.longest_answers)
    yield from checked.warnings


def warnings_of(plan: Plan, longest_answers: Mapping[str, int]) -> Iterator[str]:
    """Iterate over the warnings, one line each."""
    for name, run in plan.first_runs.items():
        need, allowed = longest_answers.get(name, 0), run.config.training.max_tokens
        if need and run.max_steps and run.answers_alone and allowed > GENEROUS * (need + 1):
            yield (
                f"{name}: max_tokens = {allowed}, but the longest answer has {need} "
                f"characters, and every token costs time: training.max_tokens = {2 * (need + 1)} is enough"
            )
    yield from _without_effect(plan)
    yield from _alike(plan)
    choices = {
        repr(
            (data.curriculum, data.curriculum_params, data.refill, data.refill != "none" and data.refill_most)
        )
        for data in (run.config.data for run in plan.first_runs.values())
    }
    if len(choices) > 1:
        yield (
            "conditions differ in curriculum or refill: they see different prompts, and their steps sample "
            "different numbers of tokens; compare them at equal amounts, with retrain compare --per tokens"
        )
    yield from _refilled(plan)
    if plan.decision is not None:
        from retrain.plan.decidable import undecidable  # not at the top: most files decide nothing

        yield from filter(None, [undecidable(plan)])
        over = plan.decision.over
        if plan.decision.per == "steps" and not isinstance(over, str) and not over[0]:
            yield f"decision.over = [0, {over[1]:g}]: steps begin at 1, so it means [1, {over[1]:g}]"
        if any(run.config.run and run.config.run.ends_per != "steps" for run in plan.first_runs.values()):
            yield (
                f"runs end once they reach the end of decision.over in {plan.decision.per}; where that is in "
                "steps is not known, so steps, times and costs are told as if they went to max_steps"
            )
    configs = [run.config for run in plan.first_runs.values()]
    if any(config.throttle.enabled and config.throttle.min_level == "paused" for config in configs):
        yield 'throttle.min_level = "paused" never trains, even on an idle machine; use "minimal" or less'
    pressed = [c for c in configs if c.backpressure.enabled and c.backpressure.control == "batch"]
    throttled = [c for c in configs if c.throttle.enabled and c.throttle.control == "batch"]
    if (pressed or throttled) and len(plan.conditions) > 1:
        yield (
            "back pressure or the load throttle may give conditions different batch sizes, which biases the "
            'comparison; control = "microbatch" keeps the optimizer\'s batch the same'
        )
    if any(
        config.training.lr_schedule != "constant"
        and config.backpressure.max_batch_size > config.training.batch_size
        and (config.backpressure.objective == "goodput" or config.scaling.rule in ("adascale", "adamscale"))
        for config in pressed  # their batches may grow, and the noise by which these count is measured
    ):
        yield (
            "a larger batch counts as several steps for lr_schedule: the learning rate reaches 0 before "
            'max_steps, and later steps learn nothing; set lr_schedule = "constant" or control = "microbatch"'
        )
    advice = (plugin_of(config.backend.backend).advise(config) or () for config in configs)
    yield from dict.fromkeys(chain.from_iterable(advice))
    silent = [b for b in plan.backends_with_permits if not plugin_of(b.backend).reports_calls(b.options)]
    for name in dict.fromkeys(backend.backend for backend in silent if backend.adapts_permits):
        yield (
            f'[backend].max_concurrent: "auto" stays at {plan.permits} permits, because {name} does not say '
            "that it reports its calls (`reports_calls` of retrain.BackendPlugin); set a number"
        )
    if plan.permits and plan.workers > plan.permits and not plan.permits_adapt:
        yield f"{plan.workers} workers share {plan.permits} permits: calls queue, which is fine"


def _without_effect(plan: Plan) -> Iterator[str]:
    campaign = plan.campaign
    if campaign.max_workers > 1 and not campaign.parallel:
        yield f"max_workers = {campaign.max_workers} has no effect without campaign.parallel = true"
    for key, why in unused_keys(campaign).items():
        if getattr(campaign, key) != getattr(CampaignSection(), key):
            yield f'{key} has no effect with launcher = "{campaign.launcher}": {why}'
    limiters = [run.config.rate_limiter for run in plan.first_runs.values()]
    if any(limiter.max_staleness == 0 and limiter != RateLimiterSection() for limiter in limiters):
        yield (
            "[rate_limiter] has no effect with max_staleness = 0: sampling and training take turns; "
            "set max_staleness = 1 or more to overlap them"
        )


def _refilled(plan: Plan) -> Iterator[str]:
    """Iterate over what the reward of conditions says against their refill."""
    refilled = {
        f'{name}, source "{source}"' if source else name: own
        for name, run in plan.first_runs.items()
        for source, own in by_source(run.config).items()
        if run.config.data.most_refill
    }
    if not refilled:
        return
    from retrain.plugins.rewards.opening import range_of  # not at the top: few files refill

    advised, ties = [], []
    for name, own in refilled.items():
        refill, reward = own.data.refill, own.reward
        outcome = registry.ask("rewards", reward.reward, "outcome", reward.params)
        if refill == "tied" and outcome:
            advised.append(name)
        elif refill == "outcome" and not outcome and range_of(reward.reward).high != 1:
            ties.append(name)
    if advised:
        yield (
            f"{first_of(advised, NAMED)}: the reward has parts, so groups in which all fail may still differ "
            'and are trained on: data.refill = "outcome" replaces them'
        )
    if ties:
        yield (
            f"{first_of(ties, NAMED)}: the reward does not say which completions are right, so "
            'data.refill = "outcome" replaces groups whose rewards are equal, as "tied" does'
        )


def _alike(plan: Plan) -> Iterator[str]:
    """Iterate over groups of conditions whose runs would be identical, and all paid in full."""
    groups: dict[str, list[RunPlan]] = {}
    for run in plan.first_runs.values():
        effective = _effective(run.config)
        contents = run.config.run.files if run.config.run else None
        same = run.config_hash if effective == run.config else digest(effective, contents)
        groups.setdefault(same, []).append(run)
    for runs in groups.values():
        if len(runs) > 1:
            names = first_of([run.condition for run in runs], NAMED)
            yield f"{names}: cannot differ{_why(runs)}; keep one of them"


def _why(runs: Sequence[RunPlan]) -> str:
    """Return which keys set runs apart, and why these have no effect."""
    keys = [
        f"{section}.{key}"
        for section in ("algorithm", "environment")
        for key in vars(getattr(runs[0].config, section))
        if len({repr(getattr(getattr(run.config, section), key)) for run in runs}) > 1
    ]
    if not keys:
        return ", as no key that decides results sets them apart"
    of_ratios = {"algorithm.loss_mode", "algorithm.loss_params", "algorithm.ratio_cap"}
    is_once = ", since every ratio is 1 with one update of each batch" if of_ratios.intersection(keys) else ""
    have = "have" if len(keys) > 1 else "has"
    return f": {', '.join(keys)} {have} no effect here{is_once}"


def _effective(config: Config) -> Config:
    """Return a configuration without the keys that have no effect in it."""
    algorithm, environment = config.algorithm, config.environment
    if not algorithm.kl_coef:
        algorithm = replace(algorithm, kl_reference="start")
    training, backend = config.training, config.backend
    is_once = training.updates_per_batch == training.minibatches == 1
    is_fresh = is_once and not config.rate_limiter.max_staleness
    if is_fresh and plugin_of(backend.backend).samples_as_it_trains(backend.options):  # every ratio is 1
        if algorithm.ratio_cap > 1 + ROUNDING:
            algorithm = replace(algorithm, ratio_cap=0.0)
        published = CLIPPED_LOSSES.get(algorithm.loss_mode)
        bounds = published and dict(zip(BOUNDS, published, strict=True)) | dict(algorithm.loss_params)
        if bounds and min(bounds[name] for name in BOUNDS) > ROUNDING:
            others = {key: value for key, value in algorithm.loss_params.items() if key not in BOUNDS}
            algorithm = replace(algorithm, loss_mode="importance_sampling", loss_params=others)
    if not algorithm.ratio_cap:
        algorithm = replace(algorithm, ratio_cap_scope="token", ratio_cap_mode="truncate")
    if not plays_episodes(config) or environment.turn_reward == "final":
        environment = replace(environment, discount=1.0)
    return replace(config, algorithm=algorithm, environment=environment)
