"""Environments: programs that answer a policy, turn by turn, and reward it.

A plugin is one file or folder with `open_episode(*, <options>)`, called once per episode, or a class of the
user's own, named by its dotted path. It returns an `Episode`, or a `Program`, which brings its own loop.

An exception, a call that takes longer than `[environment].time_limit_s`, or a wrong result costs its episode.

Not plugins, but shared: `episode` (calls one and checks it), `plain_calls`, `hosts` and `coroutine_loop`
(threads, processes and an event loop for it), `endpoint` (the address for programs).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from retrain.base import registry
from retrain.base.registry import Hook, PluginSpec
from retrain.base.rollouts import CallForm, Prompt

SPEC = PluginSpec(
    "environment",
    "open_episode",
    members=("start", "step"),
    methods=(
        Hook("start", ("prompt",), "what the policy reads first"),
        Hook("step", ("completion",), "(observation, reward, done)"),
    ),
    instead=Hook("run", ("prompt", "base_url", "api_key"), "the reward"),
    hooks=(
        Hook("check_options", ("options",), "problems of [environment.options], as `key: what is wrong`"),
        Hook("check_run", ("config",), "problems of a run's configuration, as `[section].key: what`"),
        Hook("servers", ("options",), "address -> option, of each server that must answer before a run"),
        Hook("tools", ("options",), "JSON schemas of functions, to be shown by the model's chat template"),
        Hook(
            "prepare", ("options", "form"), "what a run's episodes share, the opener's argument; closed then"
        ),
    ),
    judge="check_options",
)


Said: TypeAlias = str | list[dict[str, str]]  # a user's message, or a conversation: role and content of each


class Episode:
    """What the policy plays; a class of your own needs not derive from it.

    Each method may be a coroutine function. `tool_calls` and `tool_errors` are recorded in the run's rows.
    """

    tool_calls: int = 0  # so far
    tool_errors: int = 0  # those of them that failed

    def start(self, prompt: Prompt) -> Said | Awaitable[Said]:
        """Return what the policy reads first."""
        raise NotImplementedError

    def step(self, completion: str) -> tuple[Said, float | None, bool] | Awaitable[tuple[Said, Any, bool]]:
        """Return (observation, reward, done).

        A reward of None at the end leaves scoring to `[reward]`, which gets the last completion.
        """
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds; called at the end."""


class Program:
    """What asks the policy for turns itself, at an OpenAI-compatible address; see `harness.py`.

    A class of your own needs not derive from it. A module whose `open_episode` returns one sets
    `BRINGS_LOOP = True`.
    """

    def run(self, prompt: Prompt, base_url: str, api_key: str) -> float | Awaitable[float | None] | None:
        """Return the reward; None leaves scoring to `[reward]`."""
        raise NotImplementedError


def brings_loop(name: str) -> bool:
    """Whether an environment's episodes are programs, which ask for turns themselves."""
    plugin = registry.plugin("environments", name)
    return bool(plugin.constant("BRINGS_LOOP", False)) or hasattr(plugin.function(), "run")


@contextmanager
def opened(
    name: str, options: Mapping[str, Any], form: CallForm | None = None
) -> Iterator[Callable[[], Any]]:
    """Yield the function that opens an episode.

    Args:
        form: how the model writes calls of the environment's functions.
    """
    open_episode = registry.bound("environments", name, options)
    prepare = registry.hook("environments", name, "prepare")
    if prepare is None:
        yield open_episode
        return
    shared = prepare(options, form)
    try:
        yield partial(open_episode, shared)
    finally:
        shared.close()
