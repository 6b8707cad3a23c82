"""A program of yours that brings its own loop, and calls the policy at an OpenAI-compatible address.

The worker serves the address on loopback, and the key tells episodes apart. Any class with
`run(prompt, base_url, api_key)` in place of `start` and `step` is such an environment.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.registry import call_problem
from retrain.base.rollouts import Prompt

BRINGS_LOOP = True
GIVEN = ("prompt", "base_url", "api_key")


def open_episode(*, run: str, config: Mapping[str, Any] | None = None) -> Program:
    """Return an episode.

    Args:
        run: dotted path of a function (prompt, base_url, api_key) -> reward, plain or async. None leaves the
            reward to `[reward]`, which gets the last completion.
        config: table of its keyword arguments.

    Raises:
        ConfigError: there is no such function, or it cannot be called so.
    """
    function = registry.function_of_option("run", run)
    table = config or {}
    if problem := call_problem(function, GIVEN, [key for key in table if registry.takes(function, key)]):
        raise ConfigError(f"run: {run!r} {problem}")
    parameters: Collection[inspect.Parameter] = ()
    with suppress(TypeError, ValueError):  # written in C, which takes what it takes
        parameters = inspect.signature(function).parameters.values()
    keys = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)][len(GIVEN) :]
    unknown = [key for key in table if key not in keys] if parameters else []
    if unknown and all(p.kind is not p.VAR_KEYWORD for p in parameters):
        others = f"it takes {', '.join(keys) or 'none'}"
        hint = registry.hint(unknown[0], keys, others)
        raise ConfigError(f"config: {run!r} has no key {unknown[0]!r}; {hint}")
    needed = set(keys) & set(registry.needed_by(function)) - table.keys()
    if lacking := ", ".join(sorted(needed, key=keys.index)):
        raise ConfigError(f"config: {run!r} needs {lacking}, which the table does not give")
    return Program(partial(function, **table))


@dataclass
class Program:
    """One episode."""

    run: Callable[[Prompt, str, str], Any]
