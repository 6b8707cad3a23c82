"""Conditions x seeds -> runs, each with its own resolved configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.base.errors import ConfigError, Problem
from retrain.config.digest import digest
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
    TrainingSection,
)
from retrain.plan.matrix import ENOUGH_SEEDS, Origin, Plan, RunPlan
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
    campaign, seeds = config.campaign or CampaignSection(), _seeds(config, drawn_seed)
    fewest = ENOUGH_SEEDS if config.decision and config.decision.max_questions else FEWEST_SEEDS
    all_seeds = _with_further(config, seeds, added_seeds)
    bases = _conditions(config)
    conditions = []
    for place, (name, relative) in enumerate(bases):
        base = with_absolute_paths(relative)
        origin = Origin.GIVEN if place < len(bases) - proposed else Origin.PROPOSED
        conditions.append((name, base, contents_of(base), origin))
    runs = []
    for place, seed in enumerate(all_seeds):
        is_added = place >= len(all_seeds) - added_seeds
        for name, base, contents, origin in conditions:
            training = TrainingSection(**vars(base.training) | {"seed": seed})
            seeded = Config(**vars(base) | {"training": training})
            run_id, config_hash = _run_id(name, seed), digest(seeded, contents)
            ending = {key: getattr(base.run, key) for key in ("ends_at", "ends_per") if base.run}
            identity = RunSection(run_id, "", name, config_hash, contents, version=CURRENT, **ending)
            resolved = Config(**vars(seeded) | {"run": identity})
            origin_of_run = Origin.ADDED if is_added else origin
            runs.append(RunPlan(run_id, name, seed, resolved, config_hash, origin_of_run))
    plan = Plan(
        name=campaign.name or Path(file_name).stem or "campaign",
        campaign=campaign,
        runs=tuple(runs),
        is_single_run=config.campaign is None,
        log_dir=Path(config.logging.log_dir),
        mirror=config.logging.mirror,
        config_hash=hashlib.sha256("".join(r.config_hash for r in runs).encode()).hexdigest()[:16],
        decision=_decision(config),
        search_seeds=tuple(seeds) if campaign.search else (),
        first_seeds=fewest if campaign.search else max(fewest, len(seeds)),
    )
    problems: list[Problem] = []
    if campaign.search is not None:
        from retrain.plan.search import search_problems  # not at the top: few files have the table

        problems = [problem.below("campaign", "search") for problem in search_problems(plan, campaign.search)]
    if plan.decision is not None and not problems:
        from retrain.plan.decidable import decision_problems  # nor this

        wrong = decision_problems(plan.decision, plan, len(seeds))
        problems = [problem.below("decision") for problem in wrong]
    if problems:
        raise ConfigError([f"{file_name} {problem}" for problem in problems])
    return plan


def _decision(config: Config) -> DecisionSection | None:
    """Return the table by which a campaign decides; a search always does."""
    search = config.campaign.search if config.campaign else None
    return config.decision or (DecisionSection(metric=search.metric) if search else None)


def planned_runs(config: Config, drawn_seed: int | None, added_seeds: int = 0) -> list[RunEntry]:
    """List a file's runs in launch order, without reading the files they name; none if the seed is not known.

    Only the types of the file need to be valid.
    """
    if drawn_seed is None and draws_seeds(config):
        return []
    from retrain.records.run_row import RunEntry

    conditions, seeds = _conditions(config), _with_further(config, _seeds(config, drawn_seed), added_seeds)
    return [
        RunEntry(_run_id(name, seed), name, seed, base.last_step)
        for seed in seeds
        for name, base in conditions
    ]


def _conditions(config: Config) -> list[tuple[str, Config]]:
    """Resolve every condition, except for its seed, by name."""
    conditions: Sequence[ConditionSection | None] = (config.campaign and config.campaign.conditions) or [None]
    resolved = []
    for condition in conditions:
        base = resolve(config, condition, seed=0)
        if table := config.decision:
            bounds = [*([] if isinstance(table.over, str) else table.over), *table.rungs]
            if table.rungs or (bounds and not table.finish):
                end = 0.0 if table.finish else bounds[-1]
                base = replace(base, run=RunSection(ends_at=end, ends_per=table.per))
        if condition is not None and condition.name:
            name = shown_name(condition.name)
        elif condition is None and base.run is not None:
            name = shown_name(base.run.condition)
        else:
            name = label_of_modes(base.algorithm.advantage_mode, base.algorithm.transform_mode)
        resolved.append((name, base))
    return resolved


def draws_seeds(config: Config) -> bool:
    """Whether each campaign of a file has seeds of its own, which the file does not tell."""
    return config.training.seed < 0 and not (config.campaign and config.campaign.seeds)


def _seeds(config: Config, drawn_seed: int | None) -> Sequence[int]:
    if config.campaign and config.campaign.seeds:
        return config.campaign.seeds
    if config.training.seed >= 0:
        return [config.training.seed]
    if drawn_seed is not None:
        return [drawn_seed]
    import secrets  # not at the top: costs 4 ms, and most files give a seed

    return [secrets.randbelow(LARGEST_SEED + 1)]


def _with_further(config: Config, seeds: Sequence[int], added: int) -> list[int]:
    """Return the seeds of the file, those that `[decision]` may add, and those that the user added."""
    table, is_search = _decision(config), bool(config.campaign and config.campaign.search)
    further = 0
    if table is not None:
        further = table.max_seeds if is_search else max(0, table.max_seeds - len(seeds))
    candidates = chain(range(max(seeds) + 1, LARGEST_SEED + 1), range(max(seeds)))
    return [*seeds, *islice((seed for seed in candidates if seed not in seeds), further + added)]


def _run_id(condition: str, seed: int) -> str:
    return f"{label_of(condition)}_s{seed}"


def shown_name(name: str) -> str:
    """Return a name if it is short and safe to print on a terminal, else its label."""
    return name if name == plain(name, LONGEST_NAME) != "" else label_of(name)
