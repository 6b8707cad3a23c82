"""Checks of a run's parts before anything is created: its task, environment, rewards and backend."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Sized
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from retrain.backends import plugin_of
from retrain.base import registry
from retrain.base.errors import ConfigError, Location, Problem
from retrain.base.event_loop import LeftBehindError, result_within
from retrain.base.extras import MissingPackageError
from retrain.base.rollouts import Prompt
from retrain.config.adapters import adapter_problem
from retrain.config.campaign import EvalSection
from retrain.config.keys import Tables
from retrain.config.schema import Config, EnvironmentSection

if TYPE_CHECKING:
    from retrain.plugins.tasks import Task

ADAPTER = ("model", "adapter")
NAMED = ("environment", "environment")  # the key that names an environment


class Tasks:
    """The tasks and environments of a plan, each built once for all that share it."""

    def __init__(self) -> None:
        self._built: dict[str, Task] = {}
        self._opened: dict[str, list[Problem]] = {}

    def of(self, config: Config) -> Task:
        """Return the task that a run is trained on."""
        return self._named(config.data.task, config.data.options, config)

    def asked(self, table: EvalSection, config: Config) -> list[Prompt]:
        """Return an evaluation's prompts; by default they are those that the run's task holds out."""
        task = self._named(table.task, table.options, config) if table.task else self.of(config)
        return list(task.held_out[: table.prompts])

    def opening_problems(self, table: EnvironmentSection) -> list[Problem]:
        """Return why an episode of an environment cannot be opened, or is none."""
        if (key := repr(table)) not in self._opened:
            self._opened[key] = list(_opening_problems(table))
        return self._opened[key]

    def _named(self, name: str, options: Tables, config: Config) -> Task:
        """Build a task, with a run's seed for its data; raise a ConfigError if its prompts are no prompts."""
        seed = config.data.seed
        key = json.dumps([name, options, seed], default=str, sort_keys=True)
        if key not in self._built:
            made = registry.check_made("tasks", name, registry.find("tasks", name)(seed=seed, **options))
            if not registry.is_built_in("tasks", name) and (wrong := _malformed(made)):
                raise ConfigError(f"{name!r}: {wrong}; see the page on extending for a task")
            self._built[key] = made
        return self._built[key]


def _malformed(task: Task) -> str:
    """Return what a task has in place of prompts or of an alphabet; "" for nothing."""
    for key, kind in (("train", Sized), ("held_out", Sized), ("alphabet", str)):
        if not isinstance(found := getattr(task, key), kind):
            return f"{key} is of type {type(found).__name__}, not a {'text' if kind is str else 'tuple'}"
    for prompt in chain(task.train, task.held_out):
        if not isinstance(prompt, Prompt):
            return f"{prompt!r:.80} is no retrain.Prompt"
        for key in ("text", "answer"):
            if not isinstance(found := getattr(prompt, key), str):
                return f"the {key} of prompt {prompt.id} is {found!r:.80}, not a text"
        if not _are_messages(prompt.messages):
            found = f"{prompt.messages!r:.80}"
            return f"the messages of prompt {prompt.id} are {found}, not a tuple of (role, content) pairs"
    return ""


def _are_messages(found: object) -> bool:
    """Whether messages are a tuple of pairs of texts."""
    pairs = found if isinstance(found, tuple) else (None,)
    return all(
        isinstance(one, tuple) and len(one) == 2 and all(isinstance(x, str) for x in one) for one in pairs
    )


def environment_problems(config: Config, tasks: Tasks) -> Iterator[Problem]:
    """Iterate over what a run's environment lacks, or cannot do with the backend; an episode is opened."""
    yield from registry.problems_of("environments", config.environment.environment, "check_run", config)
    yield from tasks.opening_problems(config.environment)


def _opening_problems(table: EnvironmentSection) -> Iterator[Problem]:
    """Iterate over why an episode cannot be opened, or is none; it is closed."""
    name, options, limit_s = table.environment, table.options, table.time_limit_s
    try:
        made = result_within(limit_s, registry.bound("environments", name, options))
    except LeftBehindError:
        fix = "raise [environment].time_limit_s if it needs longer"
        yield Problem(NAMED, f"opening an episode of {name!r} took longer than {limit_s:g} s; {fix}")
        return
    except MissingPackageError as error:
        yield Problem(NAMED, str(error))
        return
    except ConfigError as error:
        for problem in map(registry.read_problem, error.problems):
            yield problem.below(*(("environment", "options") if problem.where else NAMED))
        return
    try:
        registry.check_made("environments", name, made)
        if table.processes and _plays_programs(made):
            fix = "leave it at 0, and let the program start the processes that it needs"
            what = f"got {table.processes}; {name!r} plays programs, which run in the worker; {fix}"
            yield Problem(("environment", "processes"), what)
    except ConfigError as error:
        yield from (Problem(NAMED, problem) for problem in error.problems)
    if close := getattr(made, "close", None):
        with suppress(Exception):  # ignored, as in a run
            result_within(limit_s, close)


def _plays_programs(environment: Any) -> bool:
    """Whether an environment brings its own loop."""
    program = registry.spec_of("environments").instead
    return program is not None and hasattr(environment, program.name)


def reward_problems(name: str, given: Tables, prompts: Sequence[Prompt], at: Location) -> Iterator[Problem]:
    """Iterate over what rewards need that the prompts have not."""
    spec = registry.spec_of("rewards")
    for part, params in rewards_of(name, given):
        found = registry.plugin("rewards", part)
        if prompts and registry.takes(found.found, spec.by_name):
            shared = set(prompts[0].row).intersection(*(prompt.row for prompt in prompts))
            if wrong := registry.lacking_problem(found.found, {*spec.by_name_given, *params, *shared}):
                yield Problem(at, f"{part!r} {wrong}")


def backend_problems(config: Config, task: Task) -> list[Problem]:
    """Return why a backend cannot run a configuration with the prompts of a task."""
    name, adapter = config.backend.backend, config.model.adapter
    talks = next((prompt.id for prompt in chain(task.train, task.held_out) if prompt.messages), None)
    if talks is not None and not config.backend.options.get("chat_template"):
        fix = "backend local or tinker, and [backend.options].chat_template = true"
        what = f"prompt {talks} is a conversation, which needs a chat template: {fix}"
        return [Problem(("data",), what)]
    if adapter and not plugin_of(name).takes_adapters(config.backend.options):
        known = registry.built_in_names("backends")
        able = ", ".join(known_name for known_name in known if plugin_of(known_name).takes_adapters({}))
        what = f"backend {name!r} cannot start from an adapter"
        return [Problem(ADAPTER, f"{what}; remove it, or use a backend that can: {able}")]
    if adapter and (missing := adapter_problem(adapter)):
        return [Problem(ADAPTER, missing)]
    return registry.problems_of("backends", name, "check", config, task)


def rewards_of(name: str, params: Tables) -> Iterator[tuple[str, Tables]]:
    """Iterate over the name and parameters of a reward or, if it consists of others, of those."""
    parts = registry.ask("rewards", name, "made_of", params)
    if parts is None:
        yield name, params
        return
    for part, its_params in parts:
        yield from rewards_of(part, its_params)
