"""What types cannot say: keys that must fit each other, and plugins with their parameters.

Works on the raw tables, so that these problems are reported together with wrong types; a value
whose type is already wrong is passed over here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from retrain import extras, registry
from retrain.config.launcher import launcher_problems
from retrain.config.resolve import SHORTHANDS
from retrain.config.schema import (
    LARGEST_SEED,
    Algorithm,
    Backend,
    BackPressure,
    Data,
    Reward,
    Training,
)
from retrain.config.trials import trial_problems
from retrain.config.warmup import warm_up_problems
from retrain.errors import ConfigError

Location = tuple[str | int, ...]
Problem = tuple[Location, str]

# (section, key that names the plugin, kind of plugin, key of its parameters, default name)
PLUGINS = (
    ("algorithm", "advantage_mode", "advantages", "advantage_params", Algorithm.advantage_mode),
    ("algorithm", "transform_mode", "transforms", "transform_params", Algorithm.transform_mode),
    ("algorithm", "loss_mode", "losses", "loss_params", Algorithm.loss_mode),
    ("data", "task", "tasks", "options", Data.task),
    ("reward", "reward", "rewards", "params", Reward.reward),
    ("backend", "backend", "backends", "options", Backend.backend),
)


def campaign_problems(raw: Mapping[str, Any], try_plugins: bool = True) -> Iterator[Problem]:
    """Check the matrix: seeds, conditions and the launcher."""
    campaign = raw.get("campaign")
    if not isinstance(campaign, dict):
        return
    if isinstance(campaign.get("seeds"), list):
        for problem in _seed_problems(campaign["seeds"]):
            yield ("campaign", "seeds"), problem
    if campaign.get("conditions") == []:
        yield ("campaign", "conditions"), "got none, so the matrix is empty; add a condition, or drop the key"
    yield from _condition_problems(campaign.get("conditions"))
    yield from launcher_problems(campaign, try_plugins)


def logging_problems(raw: Mapping[str, Any], try_plugins: bool = True) -> Iterator[Problem]:
    """Check the loggers and their parameters."""
    table = _as_table(raw.get("logging"))
    names, params = table.get("loggers"), _as_table(table.get("logger_params"))
    loggers = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    for number, name in enumerate(loggers):
        if what := _logger_problem(name, loggers[:number], try_plugins):
            yield ("logging", "loggers"), what
            continue
        for key, what in registry.problems_with_params("loggers", name, _as_table(params.get(name))):
            yield ("logging", "logger_params", name, key), what
    for name, own in params.items():
        if name not in loggers:
            yield ("logging", "logger_params", name), "is no logger of this file; add it to logging.loggers"
        elif not isinstance(own, dict):
            yield ("logging", "logger_params", name), f"got {own!r}; needs a table"


def _logger_problem(name: str, before: Sequence[str], try_plugins: bool) -> str | None:
    if what := registry.problem_with_name("loggers", name):
        return what
    if name in before:
        return f"{name!r} is named twice; once is enough"
    return extras.missing_problem("loggers", name) if try_plugins else None


def _as_table(value: object) -> Mapping[str, Any]:
    """Return a table, or an empty one in the place of a value whose wrong type is reported elsewhere."""
    return value if isinstance(value, dict) else {}


def _condition_problems(conditions: object) -> Iterator[Problem]:
    """Find what a condition says twice, differently, and what only the campaign can say."""
    for number, condition in enumerate(conditions if isinstance(conditions, list) else []):
        if not isinstance(condition, dict):
            continue
        algorithm, training = condition.get("algorithm"), condition.get("training")
        for mode in SHORTHANDS:
            spelled = algorithm.get(mode) if isinstance(algorithm, dict) else None
            if mode in condition and spelled is not None and spelled != condition[mode]:
                what = f"got {condition[mode]!r}, but its algorithm.{mode} is {spelled!r}; keep one of them"
                yield ("campaign", "conditions", number, mode), what
        if isinstance(training, dict) and "seed" in training:
            what = "a condition runs with every seed of the campaign; list it in campaign.seeds"
            yield ("campaign", "conditions", number, "training", "seed"), what


def run_problems(raw: Mapping[str, Any], try_plugins: bool = True) -> Iterator[Problem]:
    """Check what one run would use: plugins, their parameters, and bounds that cross."""
    for section, key, kind, params_key, default in PLUGINS:
        table = raw.get(section, {})
        if not isinstance(table, dict) or not isinstance(name := table.get(key, default), str):
            continue
        unusable = list(_plugin_problems(table, section, key, kind, params_key, name))
        yield from unusable
        params = table.get(params_key, {})
        if try_plugins and not unusable and isinstance(params, dict):
            for param, what in trial_problems(kind, name, params, table.get("seed", Data.seed)):
                yield ((section, params_key, param) if param else (section, key)), what
    yield from _back_pressure_problems(raw.get("backpressure", {}), raw.get("training", {}))
    yield from warm_up_problems(raw.get("warmup", {}), raw.get("backend", {}), try_plugins)
    yield from _load_function_problems(_as_table(raw.get("throttle")).get("load_fn"))


def _load_function_problems(path: object) -> Iterator[Problem]:
    if not isinstance(path, str) or not path:
        return
    try:
        registry.find_function("throttle.load_fn", path)
    except ConfigError as error:
        yield ("throttle", "load_fn"), str(error)


def plugin_names(raw: Mapping[str, Any]) -> Iterator[Problem]:
    """Check the plugins that a file names, whatever its conditions put in their place."""
    for section, key, kind, _, default in PLUGINS:
        table = raw.get(section, {})
        name = table.get(key, default) if isinstance(table, dict) else default
        if isinstance(name, str) and (what := registry.problem_with_name(kind, name)):
            yield (section, key), what


def with_default_plugins(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Spell out which plugins are used, so that a condition that names another one is seen to replace it."""
    spelled = dict(raw)
    for section, key, _, _, default in PLUGINS:
        table = spelled.get(section, {})
        if isinstance(table, dict):
            spelled[section] = {key: default, **table}
    return spelled


def _plugin_problems(
    table: Mapping[str, Any], section: str, key: str, kind: str, params_key: str, name: str
) -> Iterator[Problem]:
    if what := registry.problem_with_name(kind, name):
        yield (section, key), what
        return
    params = table.get(params_key, {})
    if not isinstance(params, dict):
        return
    for param, what in registry.problems_with_params(kind, name, params):
        yield (section, params_key, param), what


def matrix_problems(runs: Mapping[str, Mapping[str, Any]], labels: Sequence[str]) -> Iterator[Problem]:
    """Check conditions against each other: labels, and how many permits one semaphore has.

    Args:
        runs: each condition's merged tables, by what the file calls it.
        labels: the conditions' labels.
    """
    for label, times in Counter(labels).items():
        if times > 1:
            what = f"{label!r} is the label of {times} conditions; give each a name of its own"
            yield ("campaign", "conditions"), what
    wanted: dict[object, set[str]] = {}
    for tables in runs.values():
        table = tables.get("backend", {})
        if isinstance(table, dict):
            permits = table.get("max_concurrent", Backend.max_concurrent)
            wanted.setdefault(str(table.get("throttle_dir", "")), set()).add(str(permits))
    for counts in wanted.values():
        if len(counts) > 1:
            what = (
                f"conditions ask for {' and '.join(sorted(counts))} permits of one semaphore; "
                "use one number, or give each its own throttle_dir"
            )
            yield ("backend", "max_concurrent"), what


def _seed_problems(seeds: list[Any]) -> Iterator[str]:
    if not seeds:
        yield "got none, so the matrix is empty; list at least one seed"
    unfit = [s for s in seeds if type(s) is not int or not 0 <= s <= LARGEST_SEED]
    if unfit:
        yield f"got {unfit}; needs whole numbers from 0 to {LARGEST_SEED}"
    times = Counter(seed for seed in seeds if type(seed) is int)
    repeated = sorted(seed for seed, count in times.items() if count > 1)
    if repeated:
        yield f"{repeated} stand more than once, but their runs would be the same; list each seed once"


def _back_pressure_problems(table: object, training: object) -> Iterator[Problem]:
    if not isinstance(table, dict) or not isinstance(training, dict):
        return
    smallest = table.get("min_batch_size", BackPressure.min_batch_size)
    largest = table.get("max_batch_size", BackPressure.max_batch_size)
    if type(smallest) is int and type(largest) is int and largest < smallest:
        what = f"got {largest}, below min_batch_size = {smallest}; raise one or lower the other"
        yield ("backpressure", "max_batch_size"), what
        return
    batch = training.get("batch_size", Training.batch_size)
    are_numbers = all(type(n) is int for n in (batch, smallest, largest))
    if table.get("enabled") is True and are_numbers and not smallest <= batch <= largest:
        bounds = f"min_batch_size = {smallest} to max_batch_size = {largest}"
        yield (
            ("backpressure", "max_batch_size"),
            f"training.batch_size = {batch} is outside {bounds}; widen them",
        )
