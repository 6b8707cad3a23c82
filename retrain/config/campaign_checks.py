"""Checks of a whole file beyond types: seeds, conditions, the launcher and the loggers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from retrain import extras, registry
from retrain.config.checks import trial_problems
from retrain.config.drafts import Draft, Problem
from retrain.config.keys import keys_of
from retrain.config.labels import label_of, label_of_modes
from retrain.config.resolve import SHORTHANDS
from retrain.config.schema import LARGEST_SEED, Campaign

KEYS = keys_of(Campaign)
OPTIONS = KEYS["launcher"].means.params


def with_launcher_options(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return tables with `[campaign.<launcher>]` as `launcher_options`, without those of unused launchers."""
    campaign = raw.get("campaign")
    if not isinstance(campaign, dict):
        return raw
    named = campaign.get("launcher")
    others = {key for key, table in campaign.items() if isinstance(table, dict) and _is_launcher(key)}
    if not others:
        return raw
    kept = {key: value for key, value in campaign.items() if key not in others}
    if named in others:
        kept[OPTIONS] = campaign[named]
    return {**raw, "campaign": kept}


def _is_launcher(key: str) -> bool:
    return key not in KEYS and ("." in key or key in registry.names("launchers"))


def check_campaign(draft: Draft, try_plugins: bool) -> Iterator[Problem]:
    """Check the matrix and the launcher."""
    campaign = draft.config.campaign
    if campaign is None:
        return
    for problem in _seed_problems(campaign.seeds):
        yield ("campaign", "seeds"), problem
    if campaign.conditions == []:
        yield ("campaign", "conditions"), "got none, so the matrix is empty; add a condition, or drop the key"
    yield from _condition_problems(campaign)
    yield from _launcher_problems(draft, campaign, try_plugins)


def _seed_problems(seeds: list[Any] | None) -> Iterator[str]:
    if seeds == []:
        yield "got none, so the matrix is empty; list at least one seed"
    unfit = [s for s in seeds or () if type(s) is not int or not 0 <= s <= LARGEST_SEED]
    if unfit:
        yield f"got {unfit}; needs whole numbers from 0 to {LARGEST_SEED}"
    times = Counter(seed for seed in seeds or () if type(seed) is int)
    repeated = sorted(seed for seed, count in times.items() if count > 1)
    if repeated:
        listed = f"seed{'s' * (len(repeated) > 1)} {', '.join(map(str, repeated))}"
        yield f"{listed} listed more than once, which would repeat the same run; list each seed once"


def _condition_problems(campaign: Campaign) -> Iterator[Problem]:
    """Iterate over contradictions within a condition, and keys that belong to the campaign."""
    for number, condition in enumerate(campaign.conditions or ()):
        at = ("campaign", "conditions", number)
        for short, dotted in SHORTHANDS.items():
            section, _, key = dotted.partition(".")
            given, spelled = getattr(condition, short), getattr(condition, section).get(key)
            if given is not None and spelled is not None and spelled != given:
                yield (*at, short), f"got {given!r}, but its {dotted} is {spelled!r}; keep one of them"
        if "seed" in condition.training:
            what = "a condition runs with every seed of the campaign; list it in campaign.seeds"
            yield (*at, "training", "seed"), what


def _launcher_problems(draft: Draft, campaign: Campaign, try_plugins: bool) -> Iterator[Problem]:
    name, table = campaign.launcher, campaign.launcher_options
    if not draft.is_sound("campaign.launcher"):
        return
    if what := registry.problem_with_name("launchers", name):
        yield ("campaign", "launcher"), what
        return
    if not draft.is_sound(f"campaign.{OPTIONS}"):
        return
    found = registry.problems_with_params("launchers", name, table)
    if not found and try_plugins and name not in KEYS:  # a table of ours is a section with types
        found = list(trial_problems("launchers", name, table, 0))
    yield from ((("campaign", name, key) if key else ("campaign", "launcher"), what) for key, what in found)


def check_logging(draft: Draft, try_plugins: bool) -> Iterator[Problem]:
    """Check the loggers and their parameters."""
    table = draft.config.logging
    if not draft.is_sound("logging.loggers", "logging.logger_params"):
        return
    for number, name in enumerate(table.loggers):
        if what := _logger_problem(name, table.loggers[:number], try_plugins):
            yield ("logging", "loggers"), what
            continue
        params = table.logger_params.get(name)
        for key, what in registry.problems_with_params(
            "loggers", name, params if isinstance(params, dict) else {}
        ):
            yield ("logging", "logger_params", name, key), what
    for name, own in table.logger_params.items():
        if name not in table.loggers:
            yield (
                ("logging", "logger_params", name),
                "is not in logging.loggers; add it there",
            )
        elif not isinstance(own, dict):
            yield ("logging", "logger_params", name), f"got {own!r}; needs a table"


def _logger_problem(name: str, before: Sequence[str], try_plugins: bool) -> str | None:
    if what := registry.problem_with_name("loggers", name):
        return what
    if name in before:
        return f"{name!r} is named twice; once is enough"
    return extras.missing_problem("loggers", name) if try_plugins else None


def check_matrix(runs: Sequence[tuple[str, Draft]]) -> Iterator[Problem]:
    """Check conditions against each other: labels, and how many permits one semaphore has.

    Args:
        runs: each condition's name, "" for none, and its sections laid over the file's.
    """
    for label, times in Counter(_label(name, draft) for name, draft in runs).items():
        if times > 1:
            what = f"{label!r} is the label of {times} conditions; give each a name of its own"
            yield ("campaign", "conditions"), what
    wanted: dict[str, set[str]] = {}
    for _, draft in runs:
        if draft.is_sound("backend.max_concurrent", "backend.throttle_dir"):
            table = draft.config.backend
            wanted.setdefault(table.throttle_dir, set()).add(str(table.max_concurrent))
    for counts in wanted.values():
        if len(counts) > 1:
            what = (
                f"conditions ask for {' and '.join(sorted(counts))} permits of one semaphore; "
                "use one number, or give each its own throttle_dir"
            )
            yield ("backend", "max_concurrent"), what


def _label(name: str, draft: Draft) -> str:
    algorithm = draft.config.algorithm
    return label_of(name) if name else label_of_modes(algorithm.advantage_mode, algorithm.transform_mode)
