"""Tries what only a plugin can judge, before anything is created: its values, its data, its packages.

Tasks are built, backends and rewards are asked to check their options. Code of users' own (dotted
paths) is looked up and never run here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from retrain import extras, registry
from retrain.config.schema import Data
from retrain.errors import ConfigError

NAMED = re.compile(r"(?P<key>[a-z_]+): (?P<what>.+)", re.DOTALL)  # `length: got 0; needs at least 1`


def trial_problems(
    kind: str, name: str, params: Mapping[str, Any], seed: object
) -> Iterator[tuple[str, str]]:
    """Give (key of the parameters or "", problem) pairs; nothing for plugins that are not built in."""
    if name not in registry.built_in_names(kind):
        return
    missing = extras.missing_problem(kind, name)
    if missing:
        yield "", missing
    elif kind in _TRIALS:
        for problem in _TRIALS[kind](name, params, seed):
            named = NAMED.fullmatch(problem)
            yield (named["key"], named["what"]) if named else ("", problem)


def _try_task(name: str, options: Mapping[str, Any], seed: object) -> list[str]:
    try:
        registry.find("tasks", name)(seed=seed if type(seed) is int and seed >= 0 else Data.seed, **options)
    except ConfigError as error:
        return list(error.problems)
    except TypeError as error:
        return [str(error)]
    return []


def _try_backend(name: str, options: Mapping[str, Any], seed: object) -> list[str]:
    del seed
    check = registry.optional("backends", name, "check_options") if options else None
    return list(check(options)) if check else []


def _try_reward(name: str, params: Mapping[str, Any], seed: object) -> list[str]:
    del seed
    check = registry.optional("rewards", name, "check_params")
    if check is not None:
        return list(check(params))
    if not params:
        return []
    from retrain.rollouts import Prompt

    try:
        registry.find("rewards", name)("a", Prompt(0, "a=", "a"), **params)
    except ValueError as error:
        return [str(error)]
    return []


_TRIALS: Mapping[str, Callable[[str, Mapping[str, Any], object], list[str]]] = {
    "tasks": _try_task,
    "backends": _try_backend,
    "rewards": _try_reward,
}
