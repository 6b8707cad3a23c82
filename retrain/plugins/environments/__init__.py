"""Environments: programs that answer a policy, turn by turn, and reward it.

A plugin is one file or folder with `open_episode(*, <options>)`, called once per episode, or a class of the
user's own, named by its dotted path. It returns an `Episode`, or a `Program`, which brings its own loop.

An exception, a call that takes longer than `[environment].time_limit_s`, or a wrong result costs its episode.

Not plugins, but shared: `episode` (calls one and checks it), `calls` and `hosts` (threads, an event loop and
processes for it), `endpoint` (the address for programs).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from retrain.base.errors import Problem
from retrain.base.registry import Plugin, PluginSpec
from retrain.base.rollouts import CallForm, Parts, Prompt
from retrain.config.schema import Config

Said: TypeAlias = str | list[dict[str, str]]  # a user's message, or a conversation: role and content of each
Reward: TypeAlias = float | tuple[float | None, Parts] | None


class Episode:
    """What the policy plays; a class of your own needs not derive from it.

    Each method may be a coroutine function. `tool_calls` and `tool_errors` are recorded in the run's rows.
    """

    tool_calls: int = 0  # so far
    tool_errors: int = 0  # those of them that failed

    def start(self, prompt: Prompt) -> Said | Awaitable[Said]:
        """Return what the policy reads first."""
        raise NotImplementedError

    def step(self, completion: str) -> tuple[Said, Reward, bool] | Awaitable[tuple[Said, Any, bool]]:
        """Return (observation, reward, done).

        A reward of None at the end leaves scoring to `[reward]`, which gets the last completion. It may be
        `(reward, parts)`, with numbers by name for the step's row: an episode's are made of its turns' as its
        reward is.
        """
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds; called at the end."""


class Program:
    """What asks the policy for turns itself, at an OpenAI-compatible address; see `harness.py`.

    A class of your own needs not derive from it. A module whose `open_episode` returns one sets
    `BRINGS_LOOP = True`.
    """

    def run(self, prompt: Prompt, base_url: str, api_key: str) -> Reward | Awaitable[Reward]:
        """Return the reward, or (reward, parts) as an `Episode` does; None leaves scoring to `[reward]`."""
        raise NotImplementedError


class EnvironmentPlugin:
    """What the file of an environment may define beside `open_episode`, each as here without it.

    `options` is the table `[environment.options]`.
    """

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> Iterable[Problem | str]:
        """Return the problems of the table, each as `key: what is wrong`."""
        return ()

    @staticmethod
    def check_run(config: Config) -> Iterable[Problem | str]:
        """Return the problems of a run's configuration, each as `[section].key: what`."""
        return ()

    @staticmethod
    def part_weights(options: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the weight of each part that its reward is the sum of; none: those of `[reward]` count."""
        return {}

    @staticmethod
    def servers(options: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the address of each server that must answer before a run, with the key that names it."""
        return {}

    @staticmethod
    def tools(options: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        """Return JSON schemas of functions, to be shown by the model's chat template."""
        return ()

    @staticmethod
    def prepare(options: Mapping[str, Any], form: CallForm | None) -> Any:
        """Return what a run's episodes share: the opener's argument, closed at the end; None: nothing.

        `form` is how the model writes calls of the environment's functions.
        """
        return None


SPEC = PluginSpec(
    "environment",
    "open_episode",
    members=("start", "step"),
    returns=Episode,
    instead=Program,
    functions=EnvironmentPlugin,
    judge="check_options",
)


def brings_loop(plugin: Plugin) -> bool:
    """Whether an environment's episodes are programs, which ask for turns themselves."""
    return bool(plugin.constant("BRINGS_LOOP", False)) or hasattr(plugin.function(), "run")


@contextmanager
def opened(
    plugin: Plugin, options: Mapping[str, Any], form: CallForm | None = None
) -> Iterator[Callable[[], Any]]:
    """Yield the function that opens an episode; `form` is how the model writes calls of its functions."""
    open_episode = plugin.bound(options)
    shared = plugin.functions.prepare(options, form)
    if shared is None:
        yield open_episode
        return
    try:
        yield partial(open_episode, shared)
    finally:
        shared.close()
