"""Conditions x seeds -> runs, each with its own resolved configuration."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.base.errors import ConfigError, Problem
from retrain.config.digest import digest_by_seed
from retrain.config.files import contents_of, with_absolute_paths
from retrain.config.keys import CURRENT
from retrain.config.resolve import label_of, label_of_modes, resolve
from retrain.config.schema import (
    LARGEST_SEED,
    CampaignSection,
    ConditionSection,
    Config,
    DecisionSection,
    RunSection,
)
from retrain.plan.matrix import Origin, Plan, RunPlan
from retrain.records.text import plain

if TYPE_CHECKING:
    from retrain.records.run_row import RunEntry

FEWEST_SEEDS = 3  # of a campaign with `[decision]`: fewer show nothing
LONGEST_NAME = 64  # characters of a condition's own name that views show


def plan_runs(
    config: Config,
    file_name: str = "campaign",
    drawn_seed: int | None = None,
    added_seeds: int = 0,
    proposed: int = 0,
) -> Plan:
    """Return the plan of a file's runs; its name names the campaign if the file does not.

    A file without a seed gets the `drawn_seed`, or draws one. With `[decision]` the plan has all runs that
    may be needed. `added_seeds` further ones follow all others. Of the conditions, the last `proposed` are a
    sampler's. Each run says where it comes from.

    Raises ConfigError with every problem of `[campaign.search]`, or of `[decision]`.
    """
    campaign, given = config.campaign or CampaignSection(), _seeds(config, drawn_seed)
    seeds = _with_further(config, given, added_seeds)
    bases = [(name, with_absolute_paths(base)) for name, base in _conditions(config)]
    contents = [contents_of(base) for _, base in bases]
    origins = [Origin.GIVEN] * (len(bases) - proposed) + [Origin.PROPOSED] * proposed
    conditions = [
        (name, base, files, digest_by_seed(base, files), origin)
        for (name, base), files, origin in zip(bases, contents, origins, strict=True)
    ]
    added = seeds[len(seeds) - added_seeds :]
    runs = [
        _run(name, base, files, digest_of, seed, Origin.ADDED if seed in added else origin)
        for seed in seeds
        for name, base, files, digest_of, origin in conditions
    ]
    plan = Plan(
        name=campaign.name or Path(file_name).stem or "campaign",
        campaign=campaign,
        runs=tuple(runs),
        is_single_run=config.campaign is None,
        log_dir=Path(config.logging.log_dir),
        config_hash=hashlib.sha256("".join(r.config_hash for r in runs).encode()).hexdigest()[:16],
        decision=_decide(config),
        search_seeds=tuple(given) if campaign.search else (),
        first_seeds=FEWEST_SEEDS if campaign.search else max(FEWEST_SEEDS, len(given)),
    )
    _require_sound(plan, len(given), file_name)
    return plan


def _require_sound(plan: Plan, seeds: int, file_name: str) -> None:
    """Raise ConfigError with every problem of `[campaign.search]`, or of `[decision]`."""
    search, problems = plan.campaign.search, list[Problem]()
    if search is not None:
        from retrain.plan.search import search_problems  # not at the top: few files have the table

        problems = [one.below("campaign", "search") for one in search_problems(plan, search)]
    if plan.decision is not None and not problems:
        from retrain.plan.decidable import decision_problems  # nor this

        problems = [one.below("decision") for one in decision_problems(plan.decision, plan, seeds)]
    if problems:
        raise ConfigError([f"{file_name} {problem}" for problem in problems])


def _decide(config: Config) -> DecisionSection | None:
    """Return the table by which a campaign decides; a search always does."""
    search = config.campaign.search if config.campaign else None
    return config.decision or (DecisionSection(metric=search.metric) if search else None)


def planned_runs(config: Config, drawn_seed: int | None, added_seeds: int = 0) -> list[RunEntry]:
    """List a file's runs in launch order, without reading the files they name; none if the seed is not known.

    Only the types of the file need to be valid.
    """
    if drawn_seed is None and config.training.seed < 0 and not (config.campaign and config.campaign.seeds):
        return []
    from retrain.records.run_row import RunEntry

    conditions, seeds = _conditions(config), _with_further(config, _seeds(config, drawn_seed), added_seeds)
    return [
        RunEntry(_run_id(name, seed), name, seed, base.training.max_steps)
        for seed in seeds
        for name, base in conditions
    ]


def _conditions(config: Config) -> list[tuple[str, Config]]:
    """Resolve every condition, except for its seed, by name."""
    conditions: Sequence[ConditionSection | None] = (config.campaign and config.campaign.conditions) or [None]
    resolved = [(condition, resolve(config, condition, seed=0)) for condition in conditions]
    return [(_name(condition, base), base) for condition, base in resolved]


def _seeds(config: Config, drawn_seed: int | None) -> Sequence[int]:
    if config.campaign and config.campaign.seeds:
        return config.campaign.seeds
    if config.training.seed >= 0:
        return [config.training.seed]
    if drawn_seed is not None:
        return [drawn_seed]
    import secrets  # not at the top: costs 4 ms, and most files give a seed

    return [secrets.randbelow(LARGEST_SEED + 1)]


def _with_further(config: Config, given: Sequence[int], added: int) -> list[int]:
    """Return the seeds that are given, those that `[decision]` may add, and those that the user added."""
    table, is_search = _decide(config), bool(config.campaign and config.campaign.search)
    most = len(given)
    if table is not None:
        most = max(most, len(given) + table.max_seeds if is_search else table.max_seeds)
    further = (s for s in chain(range(max(given) + 1, LARGEST_SEED + 1), range(max(given))) if s not in given)
    return [*given, *islice(further, most - len(given) + added)]


def _run_id(condition: str, seed: int) -> str:
    return f"{label_of(condition)}_s{seed}"


def _name(condition: ConditionSection | None, resolved: Config) -> str:
    if condition is not None and condition.name:
        return shown_name(condition.name)
    if condition is None and resolved.run is not None:
        return shown_name(resolved.run.condition)
    return label_of_modes(resolved.algorithm.advantage_mode, resolved.algorithm.transform_mode)


def shown_name(name: str) -> str:
    """Return a name if it is short and safe to print on a terminal, else its label."""
    return name if name == plain(name, LONGEST_NAME) != "" else label_of(name)


def _run(
    condition: str,
    base: Config,
    contents: dict[str, str],
    digest_of: Callable[[int], str],
    seed: int,
    origin: Origin,
) -> RunPlan:
    run_id = _run_id(condition, seed)
    resolved = dataclasses.replace(base, training=dataclasses.replace(base.training, seed=seed))
    config_hash = digest_of(seed)
    identity = RunSection(run_id, "", condition, config_hash, contents, version=CURRENT)
    config = dataclasses.replace(resolved, run=identity)
    return RunPlan(run_id, condition, seed, config, config_hash, origin)
