"""Checks before anything is created: tasks, backends and sandboxes are built, and servers answer."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.backends import plugin_of
from retrain.base import registry
from retrain.base.errors import ConfigError, LaunchError, Location, Problem, place
from retrain.base.event_loop import LeftBehindError, result_within
from retrain.base.extras import MissingPackageError
from retrain.base.rollouts import Prompt
from retrain.config.files import adapter_problem, data_files
from retrain.config.keys import Tables
from retrain.config.prices import age_notice, misnamed_prices, missing_price, price_of
from retrain.config.resolve import as_played, by_source, environments_of, of_source, runs_here, teachers_of
from retrain.config.schema import Config, DecisionSection, EnvironmentSection, EvalSection, SourceSection
from retrain.plan.matrix import Plan
from retrain.plugins.advantages import taken_parts
from retrain.plugins.rewards.parts import part_weights
from retrain.plugins.tasks.opening import build_task, task_of

if TYPE_CHECKING:
    from retrain.backends import MemoryEstimate
    from retrain.plan.most_cost import Reading
    from retrain.plugins.sandbox import Sandbox
    from retrain.plugins.tasks import Task

ADAPTER = ("model", "adapter")
NAMED = ("environment", "environment")  # the key that names an environment
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


class Parts:
    """The tasks, environments and sandboxes of a plan, each opened once for all runs that share it."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._openings: dict[str, list[Problem]] = {}
        self._sandboxes: dict[str, Sandbox] = {}

    def task(self, config: Config) -> Task:
        """Return the task that a run is trained on."""
        if not config.data.source:
            return self._named(config.data.task, config.data.options, config.data.seed)
        key = repr((config.data, config.environment))
        if key not in self._tasks:
            self._tasks[key] = task_of(config, self._named)
        return self._tasks[key]

    def eval_prompts(self, table: EvalSection, config: Config) -> list[Prompt]:
        """Return an evaluation's prompts; by default they are those that the run's task holds out."""
        task = self._named(table.task, table.options, config.data.seed) if table.task else self.task(config)
        return list(task.held_out[: table.prompts])

    def opening_problems(self, table: EnvironmentSection) -> list[Problem]:
        """Return why an episode of an environment cannot be opened, or is none."""
        if (key := repr(table)) not in self._openings:
            self._openings[key] = list(_opening_problems(table))
        return self._openings[key]

    def sandbox(self, name: str, options: Tables) -> Sandbox:
        """Return a sandbox whose options have no problems; a ConfigError if it cannot be used here."""
        if (key := repr((name, options))) not in self._sandboxes:
            from retrain.plugins.sandbox import open_named  # not at the top: few files run programs

            self._sandboxes[key] = open_named(name, options)
        return self._sandboxes[key]

    def _named(self, name: str, options: Tables, seed: int) -> Task:
        """Build a task, with a run's seed for its data; raise a ConfigError if its prompts are no prompts."""
        key = json.dumps([name, options, seed], default=str, sort_keys=True)
        if key not in self._tasks:
            task = build_task(name, options, seed)
            if not registry.is_built_in("tasks", name) and (wrong := _malformed(task)):
                raise ConfigError(f"{name!r}: {wrong}; see the page on extending for a task")
            self._tasks[key] = task
        return self._tasks[key]


def preflight(plan: Plan, source: str) -> Checked:
    """Build each distinct task, and check the runs with their backends; a ConfigError lists every problem."""
    longest_answers: dict[str, int] = {}
    memory: dict[str, MemoryEstimate] = {}
    problems: dict[str, None] = {}
    warnings: dict[str, None] = {}
    readings: dict[str, Reading] = {}
    # conditions share the tables that they do not override
    shared_readings: dict[tuple[int, ...], Reading] = {}
    parts = Parts()
    first_runs = plan.first_runs.values()  # a seed changes nothing here
    # without all other conditions, which the checks of each would walk
    campaign = replace(plan.campaign, conditions=None, sweep={})
    misnamed = [*misnamed_prices([run.config for run in first_runs])]
    for run in first_runs:
        config = replace(run.config, campaign=campaign)
        task = parts.task(config)
        longest_answers[run.condition] = task.longest_answer
        run_problems = list(_run_problems(plan, config, parts))
        if not run_problems and (needed := memory_of(config, task.train)):
            memory[run.condition] = needed
        if not run_problems and price_of(config) is not None:
            tables = tuple(map(id, (config.data, config.backend, config.eval)))
            if tables not in shared_readings:
                from retrain.plan.most_cost import reading_of  # not at the top: few files have prices

                held_out = task.held_out[: config.data.eval_prompts]
                evals, at_end = (
                    [parts.eval_prompts(table, asked) for table in asked.eval.tables]
                    for asked in (config, _with_further(config, plan.decision))
                )
                shared_readings[tables] = reading_of(config, task.train, held_out, evals, at_end)
            readings[run.condition] = shared_readings[tables]
        warnings.update(dict.fromkeys(_warnings_of(_with_further(config, plan.decision), parts)))
        if missing := missing_price(config):
            run_problems += [missing, *misnamed]
        problems.update((f"{source} {problem}", None) for problem in run_problems)
    if problems:
        raise ConfigError(list(problems))
    warnings.update(dict.fromkeys(f"{source} {problem}" for problem in misnamed))
    return Checked(longest_answers, memory, tuple(warnings), readings)


def _warnings_of(config: Config, parts: Parts) -> Iterator[str]:
    train = parts.task(config).train
    trained = {(prompt.text, prompt.messages) for prompt in train} if config.eval.tables else set()
    for table in config.eval.tables:
        prompts = parts.eval_prompts(table, config)
        if count := sum((prompt.text, prompt.messages) in trained for prompt in prompts):
            of = f"{count} of its {len(prompts)} prompts"
            yield f'[[eval]] "{table.name}": {of} are trained on; hold them out of training'
    batch = config.training.batch_size
    if 0 < MOST_REPEATS * len(train) < batch:
        yield (
            f"[training].batch_size: got {batch}, so a step asks each of the {len(train)} training prompts "
            f"{batch // len(train)} times; lower it, or raise group_size for more rollouts of a prompt"
        )
    if (price := price_of(config)) and (old := age_notice(price, date.today())):
        yield old


def _run_problems(plan: Plan, config: Config, parts: Parts) -> Iterator[Problem]:
    task = parts.task(config)
    yield from _environment_problems(config, parts)
    if config.data.source:
        yield from _source_problems(config, parts)
    else:
        if not len(task.train):
            yield Problem(("data", "task"), f"{config.data.task!r} has no prompt to train on")
        prompts, reward = [*task.train, *task.held_out], config.reward
        yield from _reward_problems(reward.reward, reward.params, prompts, ("reward", "reward"))
        yield from backend_problems(config, task)
    yield from _part_problems(config)
    for name, options, where in _sandboxes_of_rewards(config):  # which may be of different tables
        wrong = registry.problems_with_table("sandbox", name, options)
        yield from (problem.below(*where, "sandbox_options") for problem in wrong)
    yield from _readable_problems(config, parts)
    widest = _with_further(config, plan.decision)
    yield from _eval_problems(widest, parts)
    if plan.decision is not None:
        from retrain.records.decision import HELD_OUT, evaluation_of  # not at the top: few have the table

        metric = plan.decision.metric
        is_named = any(metric.startswith(f"{HELD_OUT}{table.name}_") for table in config.eval.tables)
        if metric.startswith(HELD_OUT) and not is_named and not task.held_out:
            fix = "give it some, or decide by another metric, such as mean_reward"
            what = (
                f"{metric} is measured on held-out prompts, and {config.data.tasks!r} holds out none; {fix}"
            )
            yield Problem(("decision", "metric"), what)
        if (most := plan.decision.max_questions) is not None:
            name = evaluation_of(metric)
            asked, there = (
                len(parts.eval_prompts(table, config))
                for tables in (config.eval.tables, widest.eval.tables)
                for table in tables
                if table.name == name
            )
            at, got = ("decision", "max_questions"), f"got {most}; [[eval]] {name!r}"
            if most <= asked:
                yield Problem(at, f"{got} asks {asked} prompts already; raise it, or remove it")
            elif there < most:
                yield Problem(at, f"{got} has {there} held-out prompts; lower it, or have its task give more")


def _with_further(config: Config, table: DecisionSection | None) -> Config:
    """Return a run's configuration with all questions in an `[[eval]]` that `[decision]` may have asked."""
    if table is None or table.max_questions is None:
        return config
    from retrain.records.decision import evaluation_of  # not at the top: few files have the key

    name, prompts = evaluation_of(table.metric), table.max_questions
    tables = [replace(one, prompts=prompts) if one.name == name else one for one in config.eval.tables]
    return replace(config, eval=replace(config.eval, tables=tables))


def _source_problems(config: Config, parts: Parts) -> Iterator[Problem]:
    """Iterate over steps without an active source, over what each lacks, and over prompts of two sources."""
    sources, task, last = config.data.source, parts.task(config), config.training.max_steps
    ends = (source.until_step + 1 for source in sources if source.until_step is not None)
    for step in sorted({1, *ends}):  # where a gap may begin
        if step <= last and not any(source.is_active(step) for source in sources):
            begins = [source.from_step for source in sources if step < source.from_step <= last]
            until = min(begins, default=last + 1) - 1
            steps = f"step {step} has" if step == until else f"steps {step} to {until} have"
            what = f"{steps} no source; change from_step or until_step of one"
            yield Problem(("data", "source"), what)
    evals = {table.name for table in config.eval.tables}
    for source in sources:
        at = ("data", "source", source.label)
        if (name := f"source_{source.label}") in evals:
            what = f'"{name}" is what the fields of source "{source.label}" are called; choose another name'
            yield Problem(("eval", "tables", name, "name"), what)
        own = [prompt for prompt in task.train if prompt.source == source.label]
        held_out = [prompt for prompt in task.held_out if prompt.source == source.label]
        if not own:
            yield Problem((*at, "task"), f"{source.task!r} has no prompt to train on")
        reward, reward_at = (source, at) if source.reward else (config.reward, ("reward",))
        prompts = [*own, *held_out]
        yield from _reward_problems(reward.reward, reward.params, prompts, (*reward_at, "reward"))
        its_task = replace(task, train=tuple(own), held_out=tuple(held_out))
        yield from _table_problems(config, of_source(config, source), source, its_task, at, parts)
    yield from _overlaps(config, task)


def _overlaps(config: Config, task: Task) -> Iterator[Problem]:
    """Iterate over the pairs of sources with common prompts, which would count for two."""
    names, played = [source.label for source in config.data.source], environments_of(config)
    numbers = {name: number for number, name in enumerate(names)}
    first: dict[Hashable, int] = {}  # number of the source that has a prompt, by what it asks
    common: dict[tuple[int, int], list[Prompt]] = {}  # by the numbers of both sources
    for prompt in chain(task.train, task.held_out):
        number = numbers[prompt.source]
        question: Hashable = (prompt.text, prompt.messages)
        if not played[number].is_single_turn:  # then the text may not be all that is asked
            question = (question, prompt.answer, repr(played[number]))
        if (owner := first.setdefault(question, number)) != number:
            common.setdefault((min(owner, number), max(owner, number)), []).append(prompt)
    for (one, other), prompts in common.items():
        count = "1 prompt is" if len(prompts) == 1 else f"{len(prompts)} prompts are"
        shown = prompts[0].text[:60]
        what = f'{count} also in source "{names[one]}", such as {shown!r}; leave them out of one of the two'
        yield Problem(("data", "source", names[other], "task"), what)


def _readable_problems(config: Config, parts: Parts) -> Iterator[Problem]:
    """Iterate over what programs of the policy could read in their sandbox: answers, keys and records."""
    sandboxes = [(name, options) for name, options, _ in _sandboxes_of_rewards(config)]
    for played in environments_of(config):
        options, environment = played.options, registry.plugin("environments", played.environment)
        taken = {parameter.name for parameter in environment.parameters or ()}
        if taken.issuperset(SANDBOX_KEYS) and PROGRAMS in options.get("tools", [PROGRAMS]):
            sandboxes.append((options.get("sandbox", "auto"), options.get("sandbox_options") or {}))
    opened = [
        parts.sandbox(name, table)
        for name, table in sandboxes
        if not list(registry.problems_with_table("sandbox", name, table))
    ]
    folders = {Path(path).resolve(): path for sandbox in opened for path in sandbox.readable or ()}
    if not folders:
        return
    held = {
        "the working directory": Path.cwd(),
        "[logging].log_dir": Path(config.logging.log_dir),
        **{key: Path(path) for key, path in data_files(config).items()},
    }
    for what, held_at in held.items():
        whole = held_at.resolve()
        folder = next((folder for folder in (whole, *whole.parents) if folder in folders), None)
        if folder is not None:
            yield Problem(
                ("reward", "sandbox"),
                f"{what} ({held_at}) lies in {folders[folder]}, which programs of a policy can read; "
                "move it, or install retrain elsewhere",
            )


def _eval_problems(config: Config, parts: Parts) -> Iterator[Problem]:
    """Iterate over what every `[[eval]]` lacks, and what the backend cannot do with its prompts."""
    for table in config.eval.tables:
        prompts, at = parts.eval_prompts(table, config), ("eval", "tables", table.name)
        if not prompts:
            task_name = table.task or config.data.tasks
            what = f"{task_name!r} holds out no prompts; give it some, or name another task"
            yield Problem((*at, "task"), what)
            continue
        if table.reward or table.task or not config.data.source:  # else each source's reward scores its own
            reward = table if table.reward else config.reward
            yield from _reward_problems(reward.reward, reward.params, prompts, (*at, "reward"))
        task = replace(parts.task(config), train=(), held_out=tuple(prompts))
        yield from _table_problems(config, as_played(config, table), table, task, at, parts)


def _table_problems(
    config: Config, played: Config, table: EvalSection | SourceSection, task: Task, at: Location, parts: Parts
) -> Iterator[Problem]:
    """Iterate over what a backend cannot do with a table's prompts, and what its own environment lacks."""
    wrong = backend_problems(played, task)
    if table.environment:
        wrong += _environment_problems(played, parts)
        shown, needed = (
            list(registry.ask("environments", section.environment, "tools", section.options))
            for section in (config.environment, played.environment)
        )
        if needed and needed != shown:
            what = "has functions, which a policy sees only if [environment] has the same"
            wrong.append(Problem(("environment",), what))
    for problem in wrong:  # named where this table has the prompts, or an environment of its own
        match problem.where:
            case ("data", *inside):
                yield Problem((*at, *inside), problem.what)
            case ("environment", "environment") if table.environment:
                yield Problem((*at, "environment"), problem.what)
            case ("environment", "options", *inside) if table.environment:
                yield Problem((*at, "environment_options", *inside), problem.what)
            case ("environment", *_) if table.environment:
                yield problem.below(*at)
            case _:
                yield problem


def _malformed(task: Task) -> str:
    """Return what a task has in place of prompts or of an alphabet; "" for nothing."""
    for key, kind in (("train", Sized), ("held_out", Sized), ("alphabet", str)):
        if not isinstance(value := getattr(task, key), kind):
            return f"{key} is of type {type(value).__name__}, not a {'text' if kind is str else 'tuple'}"
    for prompt in chain(task.train, task.held_out):
        if not isinstance(prompt, Prompt):
            return f"{prompt!r:.80} is no retrain.Prompt"
        for key in ("text", "answer"):
            if not isinstance(value := getattr(prompt, key), str):
                return f"the {key} of prompt {prompt.id} is {value!r:.80}, not a text"
        messages = prompt.messages if isinstance(prompt.messages, tuple) else (None,)
        for message in messages:
            is_pair = isinstance(message, tuple) and len(message) == 2
            if not is_pair or not all(isinstance(text, str) for text in message):
                shown = f"{prompt.messages!r:.80}"
                return f"the messages of prompt {prompt.id} are {shown}, not a tuple of (role, content) pairs"
    return ""


def _environment_problems(config: Config, parts: Parts) -> Iterator[Problem]:
    """Iterate over what a run's environment lacks, or cannot do with the backend; an episode is opened."""
    yield from registry.problems_of("environments", config.environment.environment, "check_run", config)
    if not config.environment.is_single_turn:  # then there is no episode
        yield from parts.opening_problems(config.environment)


def _opening_problems(table: EnvironmentSection) -> Iterator[Problem]:
    """Iterate over why an episode cannot be opened, or is none; it is closed."""
    name, options, limit_s = table.environment, table.options, table.time_limit_s
    try:
        environment = result_within(limit_s, registry.bound("environments", name, options))
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
        registry.check_made("environments", name, environment)
        if table.processes and hasattr(environment, "run"):
            fix = "leave it at 0, and let the program start the processes that it needs"
            what = f"got {table.processes}; {name!r} plays programs, which run in the worker; {fix}"
            yield Problem(("environment", "processes"), what)
    except ConfigError as error:
        yield from (Problem(NAMED, problem) for problem in error.problems)
    if close := getattr(environment, "close", None):
        with suppress(Exception):  # ignored, as in a run
            result_within(limit_s, close)


def _reward_problems(
    reward: str, reward_params: Tables, prompts: Sequence[Prompt], at: Location
) -> Iterator[Problem]:
    """Iterate over what rewards need that the prompts have not."""
    spec = registry.spec_of("rewards")
    for part, params in _rewards_of(reward, reward_params):
        function = registry.plugin("rewards", part).found
        if prompts and registry.takes(function, spec.by_name):
            shared = set(prompts[0].row).intersection(*(prompt.row for prompt in prompts))
            if wrong := registry.lacking_problem(function, {*spec.by_name_given, *params, *shared}):
                yield Problem(at, f"{part!r} {wrong}")


def _part_problems(config: Config) -> Iterator[Problem]:
    """Iterate over what is wrong with the parts of a run's rewards, of which its advantage may need some."""
    mode, sources = config.algorithm.advantage_mode, by_source(config)
    for weighed in [config] if taken_parts(mode) else sources.values():  # all together if they are added up
        try:
            part_weights(weighed)
        except ConfigError as error:
            yield Problem(("reward", "reward"), str(error))
            return
    for name, source in sources.items():
        if not part_weights(source) and taken_parts(mode):
            fix = 'use reward = "weighted", or define part_weights in the file of a reward of your own'
            where = f", in source {name!r}" if name else ""
            lacking = f"{source.reward.reward!r} has none with a weight{where}"
            what = f"{mode!r} needs the parts of a reward, and {lacking}; {fix}"
            yield Problem(("algorithm", "advantage_mode"), what)


def backend_problems(config: Config, task: Task) -> list[Problem]:
    """Return why a backend cannot run a configuration with the prompts of a task."""
    name, adapter = config.backend.backend, config.model.adapter
    talks = next((prompt.id for prompt in chain(task.train, task.held_out) if prompt.messages), None)
    if talks is not None and not config.backend.options.get("chat_template"):
        fix = "backend local or tinker, and [backend.options].chat_template = true"
        what = f"prompt {talks} is a conversation, which needs a chat template: {fix}"
        return [Problem(("data",), what)]
    if adapter and not plugin_of(name).takes_adapters(config.backend.options):
        backends = registry.built_in_names("backends")
        able = ", ".join(backend for backend in backends if plugin_of(backend).takes_adapters({}))
        what = f"backend {name!r} cannot start from an adapter"
        return [Problem(ADAPTER, f"{what}; remove it, or use a backend that can: {able}")]
    if adapter and (missing := adapter_problem(adapter)):
        return [Problem(ADAPTER, missing)]
    return [*_teacher_problems(config), *registry.problems_of("backends", name, "check", config, task)]


def _teacher_problems(config: Config) -> Iterator[Problem]:
    """Iterate over why a backend cannot learn from any teacher, or not as the run wants."""
    name, mode = config.backend.backend, config.teacher.mode
    if not (teachers := teachers_of(config)):
        return
    modes = plugin_of(name).teacher_modes(config.backend.options)
    if not modes:
        able = [b for b in registry.built_in_names("backends") if plugin_of(b).teacher_modes({})]
        what = f"backend {name!r} cannot learn from one; remove it, or use a backend that can: "
        yield Problem(next(iter(teachers.values())), what + ", ".join(able))
    elif mode not in modes:
        can, how = ", ".join(modes), ""
        if mode in plugin_of(name).teacher_modes({}):
            how = " with these [backend.options]"
        yield Problem(("teacher", "mode"), f'got "{mode}"; backend {name!r}{how} can learn by: {can}')


def _rewards_of(name: str, params: Tables) -> Iterator[tuple[str, Tables]]:
    """Iterate over the name and parameters of a reward or, if it consists of others, of those."""
    parts = registry.ask("rewards", name, "made_of", params)
    if parts is None:
        yield name, params
        return
    for part, its_params in parts:
        yield from _rewards_of(part, its_params)


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
    keys: dict[str, str] = {}
    for config in configs:
        keys |= plugin_of(config.backend.backend).servers(config)
        table = config.environment
        keys |= _servers_of("environments", table.environment, table.options, ("environment", "options"))
        for at, own in _tables(config):
            if own.environment:
                where = (*at, "environment_options")
                keys |= _servers_of("environments", own.environment, own.environment_options, where)
        for reward, params, where in _scoring(config):
            keys |= _servers_of("rewards", reward, params, where)
    for address, key in keys.items():
        # not at the top: few runs have servers; it takes 20 ms
        from retrain.base.http_client import answer_of
        from retrain.base.redaction import without_user

        if not re.match(r"https?://", address):  # reported elsewhere
            continue
        yield UsedServer(without_user(address), key, answer_of(address)[1])


def _servers_of(kind: str, plugin: str, params: Tables, where: Location) -> dict[str, str]:
    servers = registry.ask(kind, plugin, "servers", params)
    return {address: place((*where, *key.split("."))) for address, key in servers.items()}


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
    weaknesses, parts = dict[str, str](), Parts()
    for name, options, _ in chain.from_iterable(map(_sandboxes_of_rewards, configs)):
        sandbox = parts.sandbox(name, options)
        unknown = (
            "it does not say what programs can read of this machine (`Sandbox.readable`), so a campaign may "
            "lie there"
        )
        reasons = (sandbox.weakness, unknown if sandbox.readable is None else "")
        weaknesses[sandbox.name] = "; ".join(filter(None, reasons))
    return weaknesses


def sandbox_warnings(configs: Sequence[Config], sandboxes: Mapping[str, str]) -> Iterator[str]:
    """Iterate over the warnings about sandboxes and about rewards' own settings, each once."""
    for name, weakness in sandboxes.items():
        if weakness:
            yield f'sandbox "{name}": {weakness}'
    scoring = chain.from_iterable(map(_scoring, configs))
    rewards = {repr(part): part for name, params, _ in scoring for part in _rewards_of(name, params)}
    advice = (registry.ask("rewards", name, "advise_params", params) for name, params in rewards.values())
    yield from dict.fromkeys(chain.from_iterable(advice))


def _scoring(config: Config) -> Iterator[tuple[str, Tables, Location]]:
    """Iterate over the rewards of a run, its sources and evaluations, their parameters and these' places."""
    yield config.reward.reward, config.reward.params, ("reward", "params")
    for at, table in _tables(config):
        if table.reward:
            yield table.reward, table.params, (*at, "params")


def _tables(config: Config) -> Iterator[tuple[Location, EvalSection | SourceSection]]:
    """Iterate over the tables that may have a reward and an environment of their own, and their places."""
    yield from ((("eval", "tables", table.name), table) for table in config.eval.tables)
    yield from ((("data", "source", source.label), source) for source in config.data.source)


def runs_programs(config: Config) -> bool:
    """Whether a run's reward runs programs that a policy wrote: it takes a sandbox."""
    return any(_sandboxes_of_rewards(config))


def _sandboxes_of_rewards(config: Config) -> Iterator[tuple[str, Tables, Location]]:
    """Iterate over the sandboxes of rewards, `[reward]`'s or their own: name, options, the reward's table."""
    shared = {"sandbox": config.reward.sandbox, "sandbox_options": config.reward.sandbox_options}
    for reward, reward_params, where in _scoring(config):
        for name, params in _rewards_of(reward, reward_params):
            taken = {parameter.name for parameter in registry.plugin("rewards", name).parameters or ()}
            if taken.issuperset(shared):
                table = params if "sandbox" in params else {**shared, **params}
                yield table["sandbox"], table.get("sandbox_options") or {}, where
