"""Checks before anything is created: tasks, backends and sandboxes are built, and servers answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.backends import plugin_of
from retrain.base import registry
from retrain.base.errors import ConfigError, LaunchError, Location, Problem, place
from retrain.base.rollouts import Prompt
from retrain.config.files import data_files
from retrain.config.keys import Tables
from retrain.config.launching import runs_here
from retrain.config.prices import age_notice, misnamed_prices, missing_price, price_of
from retrain.config.resolve import as_played
from retrain.config.schema import Config
from retrain.plan.matrix import Plan
from retrain.plan.most_cost import Reading, reading_of
from retrain.plan.part_checks import (
    Tasks,
    backend_problems,
    environment_problems,
    reward_problems,
    rewards_of,
)
from retrain.plugins.sandbox import open_named

if TYPE_CHECKING:
    from retrain.backends import MemoryEstimate
    from retrain.plugins.tasks import Task

SANDBOX_KEYS = ("sandbox", "sandbox_options")  # of a reward or an environment that runs programs
PROGRAMS = "python"  # the tool that does
MOST_REPEATS = 10  # of a prompt in a step without a warning: more is a slip of the hand


@dataclass(frozen=True, slots=True)
class Checked:
    """What the checks found out about each condition's runs."""

    longest_answers: Mapping[str, int]  # in characters; 0 without answers
    memory: Mapping[str, MemoryEstimate]  # of one run; only where its backend knows
    warnings: Sequence[str] = ()  # one line each
    readings: Mapping[str, Reading] = field(default_factory=dict)  # only where prices are known


def preflight(plan: Plan, source: str) -> Checked:
    """Build each distinct task, and check the runs with their backends; a ConfigError lists every problem."""
    longest_answers: dict[str, int] = {}
    memory: dict[str, MemoryEstimate] = {}
    problems: dict[str, None] = {}
    warnings: dict[str, None] = {}
    readings: dict[str, Reading] = {}
    tasks = Tasks()
    first_runs = plan.first_runs().values()  # a seed changes nothing here
    # without all other conditions, which the checks of each would walk
    campaign = replace(plan.campaign, conditions=None, sweep={})
    misnamed = [*misnamed_prices([run.config for run in first_runs])]
    for run in first_runs:
        config = replace(run.config, campaign=campaign)
        task = tasks.of(config)
        longest_answers[run.condition] = task.longest_answer
        found = list(_run_problems(plan, config, tasks))
        if not found and (needed := memory_of(config, task.train)):
            memory[run.condition] = needed
        if not found and price_of(config) is not None:
            held_out = task.held_out[: config.data.eval_prompts]
            asked = [tasks.asked(table, config) for table in config.eval.tables]
            readings[run.condition] = reading_of(config, task.train, held_out, asked)
        warnings.update(dict.fromkeys(_warnings_of(config, tasks)))
        if missing := missing_price(config):
            found += [missing, *misnamed]
        problems.update((f"{source} {problem}", None) for problem in found)
    if problems:
        raise ConfigError(list(problems))
    warnings.update(dict.fromkeys(f"{source} {one}" for one in misnamed))
    return Checked(longest_answers, memory, tuple(warnings), readings)


def _warnings_of(config: Config, tasks: Tasks) -> Iterator[str]:
    yield from _trained_on(config, tasks)
    batch, prompts = config.training.batch_size, len(tasks.of(config).train)
    if 0 < MOST_REPEATS * prompts < batch:
        yield (
            f"[training].batch_size: got {batch}, so a step asks each of the {prompts} training prompts "
            f"{batch // prompts} times; lower it, or raise group_size for more rollouts of a prompt"
        )
    if (price := price_of(config)) and (old := age_notice(price, date.today())):
        yield old


def _run_problems(plan: Plan, config: Config, tasks: Tasks) -> Iterator[Problem]:
    task = tasks.of(config)
    prompts = [*task.train, *task.held_out]
    if not len(task.train):
        yield Problem(("data", "task"), f"{config.data.task!r} has no prompt to train on")
    yield from environment_problems(config, tasks)
    yield from reward_problems(config.reward.reward, config.reward.params, prompts, ("reward", "reward"))
    for name, options, where in _sandboxes_named(config):  # which may be of different tables
        wrong = registry.problems_with_table("sandbox", name, options)
        yield from (problem.below(*where, "sandbox_options") for problem in wrong)
    yield from _readable_problems(config)
    yield from backend_problems(config, task)
    yield from _eval_problems(config, tasks)
    yield from _decision_problems(plan, config, task)


def _readable_problems(config: Config) -> Iterator[Problem]:
    """Iterate over what programs of the policy could read in their sandbox: answers, keys and records."""
    sandboxes = [
        open_named(name, options)
        for name, options, _ in chain(_sandboxes_named(config), _sandbox_of_tools(config))
        if not list(registry.problems_with_table("sandbox", name, options))
    ]
    folders = {Path(path).resolve(): path for sandbox in sandboxes for path in sandbox.readable or ()}
    if not folders:
        return
    held = {
        "the working directory": Path.cwd(),
        "[logging].log_dir": Path(config.logging.log_dir),
        **{key: Path(path) for key, path in data_files(config).items()},
    }
    for what, held_at in held.items():
        whole = held_at.resolve()
        for folder in (whole, *whole.parents):
            if folder in folders:
                yield Problem(
                    ("reward", "sandbox"),
                    f"{what} ({held_at}) lies in {folders[folder]}, which programs of a policy can read; "
                    "move it, or install retrain elsewhere",
                )
                break


def _sandbox_of_tools(config: Config) -> Iterator[tuple[str, Tables, Location]]:
    """Return the sandbox of an environment whose policy may run programs."""
    name, options = config.environment.environment, config.environment.options
    taken = {known.name for known in registry.plugin("environments", name).parameters or ()}
    if taken.issuperset(SANDBOX_KEYS) and PROGRAMS in options.get("tools", [PROGRAMS]):
        yield options.get("sandbox", "auto"), options.get("sandbox_options") or {}, ("environment", "options")


def _trained_on(config: Config, tasks: Tasks) -> Iterator[str]:
    """Iterate over warnings of evaluations that ask what the run is trained on."""
    if not config.eval.tables:
        return
    trained = {(prompt.text, prompt.messages) for prompt in tasks.of(config).train}
    for table in config.eval.tables:
        asked = tasks.asked(table, config)
        if known := sum((prompt.text, prompt.messages) in trained for prompt in asked):
            of = f"{known} of its {len(asked)} prompts"
            yield f'[[eval]] "{table.name}": {of} are trained on; hold them out of training'


def _eval_problems(config: Config, tasks: Tasks) -> Iterator[Problem]:
    """Iterate over what every `[[eval]]` lacks, and what the backend cannot do with its prompts."""
    for table in config.eval.tables:
        prompts, at = tasks.asked(table, config), ("eval", "tables", table.name)
        if not prompts:
            named = table.task or config.data.task
            what = f"{named!r} holds out no prompts; give it some, or name another task"
            yield Problem((*at, "task"), what)
            continue
        reward = table if table.reward else config.reward
        yield from reward_problems(reward.reward, reward.params, prompts, (*at, "reward"))
        played = as_played(config, table)
        asked = replace(tasks.of(config), train=(), held_out=tuple(prompts))
        wrong = backend_problems(played, asked)
        if table.environment:
            wrong += [*environment_problems(played, tasks), *_other_functions(config, played)]
        yield from (_of_evaluation(problem, at, owns=bool(table.environment)) for problem in wrong)


def _of_evaluation(problem: Problem, at: Location, *, owns: bool) -> Problem:
    """Return a problem with prompts, or an environment of its own, where an evaluation names them."""
    match problem.where:
        case ("data", *inside):
            return Problem((*at, *inside), problem.what)
        case ("environment", "environment") if owns:
            return Problem((*at, "environment"), problem.what)
        case ("environment", "options", *inside) if owns:
            return Problem((*at, "environment_options", *inside), problem.what)
        case ("environment", *_) if owns:
            return problem.below(*at)
    return problem


def _other_functions(config: Config, played: Config) -> Iterator[Problem]:
    """Return that an evaluation's environment has functions that the run's does not show to the policy."""
    shown, needed = (
        registry.ask("environments", table.environment, "tools", table.options) or ()
        for table in (config.environment, played.environment)
    )
    if needed and list(needed) != list(shown):
        what = "has functions, which a policy sees only if [environment] has the same"
        yield Problem(("environment",), what)


def _decision_problems(plan: Plan, config: Config, task: Task) -> Iterator[Problem]:
    """Iterate over why no run will have the metric that decides."""
    if plan.decision is None:
        return
    from retrain.records.decision import HELD_OUT  # not at the top: few files have the table

    metric = plan.decision.metric
    is_named = any(metric.startswith(f"{HELD_OUT}{table.name}_") for table in config.eval.tables)
    if metric.startswith(HELD_OUT) and not is_named and not task.held_out:
        fix = "give it some, or decide by another metric, such as mean_reward"
        what = f"{metric} is measured on held-out prompts, and {config.data.task!r} holds out none; {fix}"
        yield Problem(("decision", "metric"), what)


def memory_of(config: Config, prompts: Sequence[Prompt] = ()) -> MemoryEstimate | None:
    """Return what a run takes of the memory here; None if its backend does not know, or it runs elsewhere."""
    if not runs_here(config.campaign):
        return None
    return plugin_of(config.backend.backend).memory(config, prompts)


@dataclass(frozen=True, slots=True)
class UsedServer:
    """A server that runs use."""

    address: str  # without a user or password
    key: str  # that names it
    silence: str  # why it does not answer, "" if it does


def servers_of(configs: Iterable[Config]) -> Iterator[UsedServer]:
    """Iterate over the servers of runs, each contacted once.

    A backend lists them in `servers(config)`, a reward or an environment in `servers(table)`: address -> the
    key that sets it. Any response counts as an answer, including an HTTP error; no secrets are sent.
    """
    named: dict[str, str] = {}
    for config in configs:
        named |= _servers_named(config)
    for address, key in named.items():
        # not at the top: few runs have servers; it takes 20 ms
        from retrain.base.http_client import answer_of
        from retrain.base.redaction import without_user

        if not re.match(r"https?://", address):  # reported elsewhere
            continue
        yield UsedServer(without_user(address), key, answer_of(address)[1])


def _servers_named(config: Config) -> dict[str, str]:
    """Return the addresses that a configuration names, each with the key that sets it."""
    named = {**plugin_of(config.backend.backend).servers(config)}
    own = config.environment
    named |= _servers_of("environments", own.environment, own.options, ("environment", "options"))
    for table in config.eval.tables:
        if table.environment:
            at = ("eval", "tables", table.name, "environment_options")
            named |= _servers_of("environments", table.environment, table.environment_options, at)
    for reward, params, where in _scoring(config):
        named |= _servers_of("rewards", reward, params, where)
    return named


def _servers_of(kind: str, plugin: str, params: Tables, where: Location) -> dict[str, str]:
    found = registry.ask(kind, plugin, "servers", params) or {}
    return {address: place((*where, *key.split("."))) for address, key in found.items()}


def check_servers(configs: Iterable[Config], source: str) -> None:
    """Raise LaunchError if servers of runs do not answer; the message names all of them."""
    silent = [
        f"{source} {server.key}: no answer from {server.address} ({server.silence}); "
        "start the server or correct the address"
        for server in servers_of(configs)
        if server.silence
    ]
    if silent:
        raise LaunchError("\n".join(silent))


def sandboxes_of(configs: Sequence[Config]) -> dict[str, str]:
    """Return name -> weakness, "" for none, of runs' sandboxes; ConfigError if one cannot be used here."""
    weaknesses: dict[str, str] = {}
    for name, options, _ in chain.from_iterable(map(_sandboxes_named, configs)):
        sandbox = open_named(name, options)
        unknown = (
            "it does not say what programs can read of this machine (`Sandbox.readable`), so a campaign may "
            "lie there"
        )
        parts = [sandbox.weakness, unknown if sandbox.readable is None else ""]
        weaknesses[sandbox.name] = "; ".join(filter(None, parts))
    return weaknesses


def sandbox_warnings(configs: Sequence[Config], sandboxes: Mapping[str, str]) -> Iterator[str]:
    """Iterate over the warnings about sandboxes and about rewards' own settings, each once."""
    for name, weakness in sandboxes.items():
        if weakness:
            yield f'sandbox "{name}": {weakness}'
    parts = chain.from_iterable(map(_parts, configs))
    advice = (registry.ask("rewards", name, "advise_params", params) or () for name, params in parts)
    yield from dict.fromkeys(chain.from_iterable(advice))


def _scoring(config: Config) -> Iterator[tuple[str, Tables, Location]]:
    """Iterate over the rewards of a run and of its evaluations, their parameters, and where these are set."""
    yield config.reward.reward, config.reward.params, ("reward", "params")
    for table in config.eval.tables:
        if table.reward:
            yield table.reward, table.params, ("eval", "tables", table.name, "params")


def _parts(config: Config) -> Iterator[tuple[str, Tables]]:
    """Iterate over all rewards that score completions, those of which others consist among them."""
    for name, params, _ in _scoring(config):
        yield from rewards_of(name, params)


def runs_programs(config: Config) -> bool:
    """Whether a run's reward runs programs that a policy wrote: it takes a sandbox."""
    return any(_sandboxes_named(config))


def _sandboxes_named(config: Config) -> Iterator[tuple[str, Tables, Location]]:
    """Iterate over the sandboxes of rewards, `[reward]`'s or their own: name, options, the reward's table."""
    shared = {"sandbox": config.reward.sandbox, "sandbox_options": config.reward.sandbox_options}
    for reward, given, where in _scoring(config):
        for name, params in rewards_of(reward, given):
            taken = {known.name for known in registry.plugin("rewards", name).parameters or ()}
            if taken.issuperset(shared):
                table = params if "sandbox" in params else {**shared, **params}
                yield table["sandbox"], table.get("sandbox_options") or {}, where
