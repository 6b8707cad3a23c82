"""Checks of a run's parts before anything is created: its environment, its rewards and its backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from retrain import registry
from retrain.config.adapters import adapter_problem
from retrain.config.keys import Tables
from retrain.config.schema import Config, Environment
from retrain.errors import ConfigError
from retrain.event_loop import LeftBehindError, result_within
from retrain.extras import MissingPackageError

if TYPE_CHECKING:
    from retrain.rollouts import Prompt
    from retrain.tasks import Task


def environment_problems(config: Config) -> Iterator[str]:
    """Iterate over what a run's environment lacks, or cannot do with the backend; an episode is opened."""
    yield from registry.ask("environments", config.environment.environment, "check_run", config) or ()
    yield from list(_opening_problems(config.environment)) or _tool_problems(config)


def _opening_problems(table: Environment) -> Iterator[str]:
    """Iterate over why an episode cannot be opened, or is none; it is closed."""
    name, options = table.environment, table.options
    try:
        made = result_within(table.time_limit_s, registry.bound("environments", name, options))
    except LeftBehindError:
        yield (
            f"[environment].environment: opening an episode of {name!r} took longer than "
            f"{table.time_limit_s:g} s; raise [environment].time_limit_s if it needs longer"
        )
        return
    except MissingPackageError as error:
        yield f"[environment].environment: {error}"
        return
    except ConfigError as error:
        yield from (f"[environment.options].{problem}" for problem in error.problems)
        return
    try:
        registry.check_made("environments", name, made)
        if table.processes and _plays_programs(made):
            yield (
                f"[environment].processes: got {table.processes}; {name!r} plays programs, which run in the "
                "worker; leave it at 0, and let the program start the processes that it needs"
            )
    except ConfigError as error:
        yield from (f"[environment].environment: {problem}" for problem in error.problems)
    if close := getattr(made, "close", None):
        with suppress(Exception):  # ignored, as in a run
            result_within(table.time_limit_s, close)


def _plays_programs(environment: Any) -> bool:
    """Whether an environment brings its own loop."""
    program = registry.spec_of("environments").instead
    return program is not None and hasattr(environment, program.name)


def _tool_problems(config: Config) -> Iterator[str]:
    """Iterate over why a backend cannot show an environment's functions to the policy."""
    table, backend = config.environment, config.backend.backend
    if schemas := registry.ask("environments", table.environment, "tools", table.options):
        yield from registry.ask("backends", backend, "check_tools", config, schemas) or ()


def reward_problems(reward: str, given: Tables, prompts: Sequence[Prompt], where: str) -> Iterator[str]:
    """Iterate over what rewards need that the prompts have not."""
    spec = registry.spec_of("rewards")
    for name, params in rewards_of(reward, given):
        found = registry.plugin("rewards", name)
        if prompts and registry.takes(found.found, spec.by_name):
            shared = set(prompts[0].row).intersection(*(prompt.row for prompt in prompts))
            if wrong := registry.lacking_problem(found.found, {*spec.by_name_given, *params, *shared}):
                yield f"{where}: {name!r} {wrong}"


def backend_problems(config: Config, task: Task, prompts: Sequence[Prompt], where: str) -> list[str]:
    """Return the backend's problems with a run; prompts are only checked if there are no others."""
    name = config.backend.backend
    if problems := list(registry.ask("backends", name, "check_run", config) or ()):
        return problems
    talks = next((prompt.id for prompt in prompts if prompt.messages), None)
    if talks is not None and config.backend.options.get("chat_template") is not True:
        return [
            f"{where}: prompt {talks} is a conversation, which needs a chat template: "
            "backend local or tinker, and [backend.options].chat_template = true"
        ]
    if problems := adapter_problems(config, task.alphabet):
        return problems
    return [
        *(registry.ask("backends", name, "check_prompts", config, prompts) or ()),
        *(registry.ask("backends", name, "check_alphabet", config, prompts, task.alphabet) or ()),
    ]


def adapter_problems(config: Config, alphabet: str) -> list[str]:
    """Return why a run cannot start from the adapter that it names; `alphabet` is its task's."""
    adapter, name = config.model.adapter, config.backend.backend
    if not adapter:
        return []
    check = registry.hook("backends", name, "check_adapter")
    if check is None:
        known = registry.built_in_names("backends")
        able = ", ".join(one for one in known if registry.hook("backends", one, "check_adapter"))
        what = f"backend {name!r} cannot start from an adapter"
        wrong = [f"{what}; remove it, or use a backend that can: {able}"]
    else:
        missing = adapter_problem(adapter)
        wrong = [missing] if missing else list(check(config, alphabet))
    return [f"[model].adapter: {what}" for what in wrong]


def rewards_of(name: str, params: Tables) -> Iterator[tuple[str, Tables]]:
    """Iterate over the name and parameters of a reward or, if it consists of others, of those."""
    parts = registry.ask("rewards", name, "made_of", params)
    if parts is None:
        yield name, params
        return
    for part, its_params in parts:
        yield from rewards_of(part, its_params)
