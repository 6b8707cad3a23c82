"""A program of yours that brings its own loop, and calls the policy at an OpenAI-compatible address.

The worker serves the address on loopback, and the key tells episodes apart. Any class with
`run(prompt, base_url, api_key)` in place of `start` and `step` is such an environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from retrain import registry
from retrain.errors import ConfigError
from retrain.registry.contract import call_problem
from retrain.rollouts import Prompt

BRINGS_LOOP = True


def open_episode(*, run: str, config: Mapping[str, Any] | None = None) -> Program:
    """Return an episode.

    Args:
        run: dotted path of a function (prompt, base_url, api_key) -> reward, plain or async. None leaves the
            reward to `[reward]`, which gets the last completion.
        config: table of its keyword arguments.

    Raises:
        ConfigError: there is no such function, or it cannot be called so.
    """
    function = partial(registry.find_function("[environment.options].run", run), **(config or {}))
    if problem := call_problem(function, ("prompt", "base_url", "api_key")):
        raise ConfigError(f"run: {run!r} {problem}")
    return Program(function)


class Program:
    """One episode."""

    def __init__(self, function: Callable[[Prompt, str, str], Any]) -> None:
        self._function = function

    def run(self, prompt: Prompt, base_url: str, api_key: str) -> Any:
        return self._function(prompt, base_url, api_key)
