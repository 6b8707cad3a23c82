"""Tries what only a plugin can judge, before anything is created: its values, its data, its packages.

Tasks of ours are built, and plugins are asked to check their tables. A task of somebody else, which may take
long, is built once for all runs that share it, when the plan is looked through.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from retrain import extras, registry
from retrain.config.schema import Data
from retrain.errors import ConfigError

NAMED = re.compile(r"(?P<key>[a-z_]+): (?P<what>.+)", re.DOTALL)  # `length: got 0; needs at least 1`


def trial_problems(
    kind: str, name: str, params: Mapping[str, Any], seed: object
) -> Iterator[tuple[str, str]]:
    """Iterate over (key of the parameters or "", problem) pairs."""
    missing = extras.missing_problem(kind, name)
    if missing:
        yield "", missing
        return
    for problem in [*_try_task(kind, name, params, seed), *_judged(kind, name, params)]:
        named = NAMED.fullmatch(problem)
        yield (named["key"], named["what"]) if named else ("", problem)


def _try_task(kind: str, name: str, options: Mapping[str, Any], seed: object) -> list[str]:
    if kind != "tasks" or not registry.is_built_in(kind, name):
        return []
    try:
        registry.find("tasks", name)(seed=seed if type(seed) is int and seed >= 0 else Data.seed, **options)
    except ConfigError as error:
        return list(error.problems)
    return []


def _judged(kind: str, name: str, params: Mapping[str, Any]) -> list[str]:
    judge = registry.spec_of(kind).judge
    check = registry.hook(kind, name, judge) if judge else None
    return list(check(params)) if check else []
