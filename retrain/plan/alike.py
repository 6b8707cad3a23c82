"""Conditions that cannot differ, because what sets them apart has no effect: each would be paid in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from retrain.backends import plugin_of
from retrain.config.digest import digest
from retrain.config.schema import Config
from retrain.plan.matrix import Plan, RunPlan
from retrain.records.text import first_of

CLIPPED_LOSSES = {"ppo": (0.2, 0.2), "cispo": (1.0, 4.0)}  # name -> bounds of the ratio, as published
NAMED = 3  # conditions of a line
ROUNDING = 0.01  # how far rounding moves a token's ratio from 1, at most
BOUNDS = ("clip_low", "clip_high")


def alike(plan: Plan) -> Iterator[str]:
    """Iterate over what to know of conditions whose runs would be identical, a line for each such group."""
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
    of_ratios = {"algorithm.loss_params", "algorithm.ratio_cap"}
    is_once = ", since every ratio is 1 with one update of each batch" if of_ratios.intersection(keys) else ""
    return f": {', '.join(keys)} has no effect here{is_once}"


def _effective(config: Config) -> Config:
    """Return a configuration without the keys that have no effect in it."""
    algorithm, environment = config.algorithm, config.environment
    if not algorithm.kl_coef:
        algorithm = replace(algorithm, kl_reference="start")
    if _is_on_policy(config):
        if algorithm.ratio_cap > 1 + ROUNDING:
            algorithm = replace(algorithm, ratio_cap=0.0)
        published = CLIPPED_LOSSES.get(algorithm.loss_mode)
        bounds = published and dict(zip(BOUNDS, published, strict=True)) | dict(algorithm.loss_params)
        if bounds and min(bounds[name] for name in BOUNDS) > ROUNDING:
            others = {key: value for key, value in algorithm.loss_params.items() if key not in BOUNDS}
            algorithm = replace(algorithm, loss_params=others)
    if not algorithm.ratio_cap:
        algorithm = replace(algorithm, ratio_cap_scope="token", ratio_cap_mode="truncate")
    if environment.is_single_turn or environment.turn_reward == "final":
        environment = replace(environment, discount=1.0)
    return replace(config, algorithm=algorithm, environment=environment)


def _is_on_policy(config: Config) -> bool:
    """Whether each completion is trained on once, by the policy that sampled it: every ratio is 1."""
    training, name, options = config.training, config.backend.backend, config.backend.options
    is_fresh = (
        not config.rate_limiter.max_staleness and training.updates_per_batch == training.minibatches == 1
    )
    return is_fresh and plugin_of(name).samples_as_it_trains(options)
