"""A file's tables as typed sections, and checks beyond types: consistent keys, plugins, the matrix.

A key with a wrong type or value counts as missing, so that everything else is still checked and every
problem of a file is reported at once: where, what, and how to fix it. Each check takes typed sections
(`Draft`) and skips keys that are wrong by themselves.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cache, partial
from types import NoneType
from typing import Any, Literal, TypeAlias, get_args, get_origin

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from retrain.base import extras, registry
from retrain.base.errors import LISTS, ConfigError, Location, Problem
from retrain.base.http_client import is_address
from retrain.base.registry import hint
from retrain.config.flow import flow_problems, overlapping
from retrain.config.keys import Key, Tables, keys_of, quote, table_at
from retrain.config.resolve import (
    PLUGINS,
    RUN_SECTIONS,
    SECTIONS,
    SHORTHANDS,
    by_source,
    hints_of,
    label_of,
    label_of_modes,
    plays_episodes,
    scripts_mixed_in,
    sections_of,
    skeleton_of,
    teachers_of,
)
from retrain.config.schema import (
    COLDEST,
    NO_REWARD,
    CampaignSection,
    ConditionSection,
    Config,
    DataSection,
    EvalSection,
    SourceSection,
    TeacherSection,
)

PluginProblems: TypeAlias = dict[str, list[Problem]]  # of plugins' own tables, by plugin and table
OnError: TypeAlias = Literal["raise", "default"]
NEEDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string in quotes",
    "list_type": "a list in [brackets]",
    "dict_type": "a table",
    "dataclass_type": "a table",
    "finite_number": "a finite number",
}
BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
    "too_short": ("min_length", "a length of at least"),
    "string_too_short": ("min_length", "a length of at least"),
    "string_too_long": ("max_length", "a length of at most"),
}
SIMPLE: Mapping[Any, Callable[..., CoreSchema]] = {
    int: partial(core_schema.int_schema, strict=True),
    float: partial(core_schema.float_schema, strict=True),
    str: partial(core_schema.str_schema, strict=True),
    bool: partial(core_schema.bool_schema, strict=True),
    Any: core_schema.any_schema,
}

KEYS = keys_of(CampaignSection)
OPTIONS = KEYS["launcher"].params
EVALS: Location = ("eval", "tables")  # a `Config` and a run.toml have [[eval]] as one section with a list
SOURCES: Location = ("data", "source")
TASK = keys_of(DataSection)["task"]
TEACHER = keys_of(TeacherSection)
EVAL_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")  # of a file and a field on every system


@dataclass(frozen=True)
class Draft:
    """The typed sections of tables, and the problems of single keys."""

    config: Config
    tables: Tables  # as they are in the file
    plugin_problems: PluginProblems | None  # None: build no task, read no file, ask no plugin
    mistakes: tuple[Problem, ...] = ()

    def is_sound(self, *keys: str) -> bool:
        """Whether keys have no problems by themselves; a table's name stands for all of its keys."""
        if not self.mistakes:
            return True
        wrong = [".".join(map(str, mistake.where)) + "." for mistake in self.mistakes]
        return not any(
            one.startswith(f"{key}.") or f"{key}.".startswith(one) for one in wrong for key in keys
        )


def draft_of(tables: Tables, plugin_problems: PluginProblems | None = None) -> Draft:
    """Return every section typed."""
    tables = overlapping(tables)
    try:
        return Draft(_validator("raise").validate_python(tables), tables, plugin_problems)
    except ValidationError as error:
        problems = [Problem(one["loc"], _explain(one)) for one in error.errors(include_url=False)]
    return Draft(_validator("default").validate_python(tables), tables, plugin_problems, tuple(problems))


@cache
def _validator(on_error: OnError) -> SchemaValidator:
    return SchemaValidator(table_schema(Config, on_error))


def table_schema(kind: Any, on_error: OnError = "raise") -> CoreSchema:
    """Return the schema of a table and the tables in it, from the types and bounds of its keys.

    Built directly, because pydantic's own way from a dataclass to this schema takes 90 ms of every start.

    Args:
        kind: class of the table.
        on_error: what a wrong or unknown key is: an error, or as good as missing.
    """
    declared = []
    for name, key in keys_of(kind).items():
        schema = _value_schema(hints_of(kind)[name], key, on_error)
        value = _with_default(schema, key.default, on_error)
        declared.append(core_schema.dataclass_field(name, value))
    config = core_schema.CoreConfig(
        extra_fields_behavior="forbid" if on_error == "raise" else "ignore", allow_inf_nan=False
    )
    arguments, names = core_schema.dataclass_args_schema(kind.__name__, declared), list(keys_of(kind))
    return core_schema.dataclass_schema(kind, arguments, names, ref=kind.__name__, config=config)


def _value_schema(annotation: Any, key: Key, on_error: OnError) -> CoreSchema:
    """Return the schema of a value of a type; nothing is coerced, and a value of `X | None` is an X."""
    kind, several = get_origin(annotation), [one for one in get_args(annotation) if one is not NoneType]
    if kind is Literal:
        return core_schema.literal_schema(several)
    if kind is dict:
        return core_schema.dict_schema(strict=True)
    if is_dataclass(annotation):
        return table_schema(annotation, on_error)
    if annotation in SIMPLE:
        return SIMPLE[annotation](**key.bounds)
    if kind is list:  # bounds other than its length's are those of its items
        (item,), length = several, int(key.bounds.get("min_length", 0))
        bounds = {name: limit for name, limit in key.bounds.items() if name != "min_length"}
        schema = _value_schema(item, replace(key, bounds=bounds), on_error)
        if isinstance(item, type) and is_dataclass(item):  # a wrong table counts as empty
            schema = _with_default(schema, item(), on_error)
        return core_schema.list_schema(schema, strict=True, min_length=length)
    first, *others = (_value_schema(one, key, on_error) for one in several)
    what = f"needs {key.needs}"
    either = core_schema.union_schema([first, *others], custom_error_type="needs", custom_error_message=what)
    return either if others else first


def _with_default(schema: CoreSchema, default: Any, on_error: OnError) -> CoreSchema:
    if is_dataclass(default) or isinstance(default, list | dict):
        return core_schema.with_default_schema(schema, default_factory=type(default), on_error=on_error)
    return core_schema.with_default_schema(schema, default=default, on_error=on_error)


def _explain(error: Mapping[str, Any]) -> str:
    """Return the problem and its fix, for one of pydantic's errors."""
    kind, location, what = error["type"], error["loc"], error["msg"]
    if kind == "unexpected_keyword_argument":
        return _unknown_key(location)
    if kind == "list_type" and location in LISTS and isinstance(error["input"], Mapping):
        return f"got a single table; write {LISTS[location]} in double brackets, once for each table"
    if kind in NEEDS:
        what = f"needs {NEEDS[kind]}"
    elif kind in BOUNDS:
        name, words = BOUNDS[kind]
        key = keys_of(_section_class(location[:-1])).get(str(location[-1]))
        because = f", because {key.because}" if key and key.because else ""
        limit = error["ctx"][name]
        what = f"needs {words} {limit if isinstance(limit, int) else f'{limit:g}'}{because}"
    elif kind == "literal_error":
        what = f"needs {error['ctx']['expected']}"
    return f"got {quote(error['input'])}; {what}"


def _unknown_key(location: Location) -> str:
    """Return that a key is unknown, and where one of its name belongs."""
    tables, name = location[:-1], str(location[-1])
    sections = [section for section in SECTIONS if section != "run"]
    names = list(keys_of(_section_class(tables))) if tables else sections
    for section, key in PLUGINS:
        for plugin_name in registry.built_in_names(key.plugin) if section in tables[-1:] else ():
            parameters = registry.plugin(key.plugin, plugin_name).parameters or ()
            if any(parameter.name == name for parameter in parameters):
                return f"unknown key; it belongs to [{section}.{key.params}]"
    if _section_class(tables) is ConditionSection:
        say, places = "write ", {section: f"{section}.{name}" for section in RUN_SECTIONS}
    else:
        say, places = "it belongs to ", {section: f"[{section}]" for section in sections}
    owners = [places[section] for section in sections_with(name) if section in places]
    fix = say + " or ".join(owners) if owners else hint(name, names, f"known: {', '.join(names)}")
    return f"unknown {'key' if tables else 'section'}; {fix}"


def sections_with(name: str) -> list[str]:
    """Return the sections that have a key of this name."""
    return [section for section, table in SECTIONS.items() if section != "run" and name in keys_of(table)]


def _section_class(tables: Location) -> Any:
    if tables[:2] == ("campaign", "conditions"):
        return ConditionSection
    section: Any = Config
    for table in tables:
        inner = sections_of(section).get(str(table))
        if inner is None:  # a table of free keys
            break
        section = inner
    return section


def check_run(draft: Draft) -> Iterator[Problem]:
    """Check what one run would use, section by section."""
    yield from check_plugins(draft)
    parts, batch = draft.config.training.minibatches, draft.config.training.batch_size
    if draft.is_sound("training.minibatches", "training.batch_size") and parts > batch:
        what = f"got {parts}; needs at most batch_size = {batch}, because a minibatch has whole groups"
        yield Problem(("training", "minibatches"), what)
    yield from _check_sources(draft)
    yield from _check_teacher(draft)
    yield from _check_ratio_cap(draft)
    yield from _check_back_pressure(draft)
    yield from _check_warm_up(draft)
    yield from _check_environment(draft)
    if path := draft.config.throttle.load_fn:
        try:
            registry.find_function("throttle.load_fn", path)
        except ConfigError as error:
            yield Problem(("throttle", "load_fn"), str(error))
    if draft.is_sound("training", "rate_limiter", "backpressure", "data.refill"):
        yield from flow_problems(draft.config)


def check_plugins(draft: Draft, *, by_name: bool = False) -> Iterator[Problem]:
    """Check the plugins that a file names and, unless `by_name`, their parameters."""
    for section, key in PLUGINS:
        if draft.is_sound(f"{section}.{key.name}"):
            table, at, params_at = getattr(draft.config, section), (section, key.name), (section, key.params)
            is_asked = not by_name and draft.is_sound(".".join(params_at))
            params = getattr(table, key.params) if is_asked else None
            yield from plugin_problems(draft, key.plugin, getattr(table, key.name), params, at, params_at)


def check_campaign(draft: Draft) -> Iterator[Problem]:
    """Check the matrix and the launcher."""
    campaign = draft.config.campaign
    if campaign is None:
        return
    if repeated := [str(seed) for seed, times in Counter(campaign.seeds).items() if times > 1]:
        listed = f"seed{'s' * (len(repeated) > 1)} {', '.join(repeated)}"
        what = f"{listed} listed more than once, which would repeat the same run; list each seed once"
        yield Problem(("campaign", "seeds"), what)
    if draft.is_sound("campaign.notify_url") and campaign.notify_url and not is_address(campaign.notify_url):
        what = 'is no address; needs one of HTTP, as "https://hooks.example/alerts"'
        yield Problem(("campaign", "notify_url"), what)
    for number, condition in enumerate(campaign.conditions or ()):  # contradictions, keys of the campaign
        at: Location = ("campaign", "conditions", number)
        for short, dotted in SHORTHANDS.items():
            section, _, key = dotted.partition(".")
            short_value, spelled = getattr(condition, short), getattr(condition, section).get(key)
            if short_value is not None and spelled is not None and spelled != short_value:
                what = f"got {short_value!r}, but its {dotted} is {spelled!r}; keep one of them"
                yield Problem((*at, short), what)
        if "seed" in condition.training:
            what = "a condition runs with every seed of the campaign; list it in campaign.seeds"
            yield Problem((*at, "training", "seed"), what)
    if draft.is_sound("campaign.launcher"):
        name, at = campaign.launcher, ("campaign", "launcher")
        is_asked = name not in KEYS and draft.is_sound(f"campaign.{OPTIONS}")  # else a section of the schema
        options = campaign.launcher_options if is_asked else None
        yield from plugin_problems(draft, "launchers", name, options, at, ("campaign", name))


def check_logging(draft: Draft) -> Iterator[Problem]:
    """Check the loggers and their parameters."""
    table = draft.config.logging
    if not draft.is_sound("logging.loggers", "logging.logger_params"):
        return
    at = ("logging", "loggers")
    for name, times in Counter(table.loggers).items():
        params_table = table.logger_params.get(name, {})
        params = params_table if isinstance(params_table, dict) else None
        yield from plugin_problems(draft, "loggers", name, params, at, ("logging", "logger_params", name))
        if times > 1:
            yield Problem(at, f"{name!r} is named twice; once is enough")
    for name, params_table in table.logger_params.items():
        where = ("logging", "logger_params", name)
        if name not in table.loggers:
            yield Problem(where, "is not in logging.loggers; add it there")
        elif not isinstance(params_table, dict):
            yield Problem(where, f"got {params_table!r}; needs a table")


def check_environment_is_named(file: Draft, conditions: Sequence[Tables]) -> Iterator[Problem]:
    """Check that keys of [environment] are read: those of the file by it, a source or a condition."""
    overriding: list[tuple[Location, Any]] = [
        (("campaign", "conditions", number), overrides.get("environment", {}))
        for number, overrides in enumerate(conditions)
    ]
    if any(source.environment for source in file.config.data.source):
        return
    table_given = file.tables.get("environment", {})
    if not file.is_sound("environment", "campaign.conditions") or "environment" in table_given:
        return
    unread = [one for one in overriding if "environment" not in one[1]]
    for at, table in (((), table_given), *unread) if len(unread) == len(overriding) else unread:
        for key in table:
            what = 'has no effect; set environment, "single_turn" for one completion'
            yield Problem((*at, "environment", key), what)


def check_matrix(runs: Sequence[tuple[str, Draft]], *, is_swept: bool = False) -> Iterator[Problem]:
    """Check conditions against each other: labels, and how many permits one semaphore has.

    `runs` holds each condition's name, "" for none, and its sections laid over the file's.
    """
    for label, times in Counter(_label(name, draft) for name, draft in runs).items():
        if times > 1:
            differ = "differ in more than case and punctuation"
            fix = f"let {'values' if is_swept else 'names'} {differ}"
            where = ("campaign", "sweep" if is_swept else "conditions")
            yield Problem(where, f"{label!r} is the label of {times} conditions; {fix}")
    alike: dict[str, list[str]] = {}
    for name in sorted({name for name, _ in runs}):
        if not is_swept and (scripts := scripts_mixed_in(name)):
            mixed = " and ".join(scripts)
            what = f"{name!a} mixes {mixed} letters, which look alike; write each word in one script"
            yield Problem(("campaign", "conditions"), what)
        alike.setdefault(skeleton_of(name), []).append(name)
    for names in alike.values():
        if len(names) > 1 and not all(map(str.isascii, names)):  # else they have one label
            where = ("campaign", "sweep" if is_swept else "conditions")
            shown = " and ".join(map(ascii, names))
            yield Problem(where, f"the names {shown} look alike; let them differ in what is seen")
    wanted: dict[str, set[str]] = {}
    for _, draft in runs:
        if draft.is_sound("backend.max_concurrent", "backend.throttle_dir"):
            table = draft.config.backend
            wanted.setdefault(table.throttle_dir, set()).add(str(table.max_concurrent))
    for counts in wanted.values():
        if len(counts) > 1:
            what = (
                f"conditions ask for {' and '.join(sorted(counts))} permits of one semaphore; "
                "use one number, or give each its own throttle_dir"
            )
            yield Problem(("backend", "max_concurrent"), what)


def with_launcher_options(raw: Tables) -> Tables:
    """Return tables with `[campaign.<launcher>]` as `launcher_options`, without those of unused launchers."""
    campaign = raw.get("campaign")
    if not isinstance(campaign, dict):
        return raw
    tables = {key for key, table in campaign.items() if isinstance(table, dict) and key not in KEYS}
    others = {key for key in tables if "." in key or key in registry.names("launchers")}
    kept = {key: value for key, value in campaign.items() if key not in others}
    if isinstance(named := campaign.get("launcher"), str) and named in others:
        kept[OPTIONS] = campaign[named]
    return {**raw, "campaign": kept}


def check_launcher_tables(raw: Tables) -> Iterator[Problem]:
    """Check that the launcher's options are read: that `with_launcher_options` drops or replaces none.

    A table of another launcher may wait for its day, unless its name may be a mistake for the launcher's.
    """
    campaign = table_at(raw, "campaign")
    named = str(campaign.get("launcher", KEYS["launcher"].default))
    if "launcher" not in campaign or "." in named:
        for key, table in campaign.items():
            if "." in key and isinstance(table, dict) and key != named:
                hint = registry.hint(key, [named], f"launcher is {named!r}")
                yield Problem(("campaign", key), f"is not read; {hint}")
    table = campaign.get(named)
    if campaign.get(OPTIONS) and (named in KEYS or isinstance(table, dict)):
        yield Problem(("campaign", OPTIONS), f"is not read beside [campaign.{named}]; move its keys there")


def plugin_problems(
    draft: Draft, kind: str, name: str, params: Tables | None, at: Location, params_at: Location
) -> Iterator[Problem]:
    """Check a plugin that a key names, and its parameters; None if those are wrong by themselves."""
    if what := registry.problem_with_name(kind, name):
        yield Problem(at, what)
        return
    # an empty table of one of ours with defaults is no mistake, and its file is not imported for that
    if params is None or (
        not params and registry.spec_of(kind).has_defaults and registry.is_built_in(kind, name)
    ):
        return
    if draft.plugin_problems is None:
        wrong = registry.problems_with_params(kind, name, params)
    else:
        seed = draft.config.data.seed
        checked = repr((kind, name, params, seed))
        if checked not in draft.plugin_problems:  # conditions have most of their plugins in common
            wrong = registry.problems_with_params(kind, name, params)
            draft.plugin_problems[checked] = wrong or _plugin_problems(kind, name, params, seed)
        wrong = draft.plugin_problems[checked]
    yield from (problem.below(*(params_at if problem.where else at)) for problem in wrong)


def _plugin_problems(kind: str, name: str, params: Tables, seed: int) -> list[Problem]:
    """Return what only a plugin can find wrong with its table, before anything is created.

    Built-in tasks are built, and plugins are asked to check their tables. A task of the user's own, which may
    take long, is built once for all runs that share it, by the preflight of the plan.
    """
    if missing := extras.missing_problem(kind, name):
        return [Problem((), missing)]
    problems = registry.judged(kind, name, params)
    if kind == "tasks" and registry.is_built_in(kind, name):
        try:
            registry.find_plugin("tasks", name)(seed=seed, **params)
        except ConfigError as error:
            problems += (registry.read_problem(problem) for problem in error.problems)
    return problems


def _label(name: str, draft: Draft) -> str:
    algorithm = draft.config.algorithm
    return label_of(name) if name else label_of_modes(algorithm.advantage_mode, algorithm.transform_mode)


def _check_teacher(draft: Draft) -> Iterator[Problem]:
    """Check that a run has a signal, and that no key of [teacher] is there without one."""
    config, table = draft.config, draft.config.teacher
    if not draft.is_sound("teacher", "reward", "algorithm", "data", "environment"):
        return
    teachers = teachers_of(config)
    if not teachers:
        for key, declared in TEACHER.items():  # run.toml has the defaults of all
            if getattr(table, key) != declared.default:
                yield Problem(("teacher", key), "has no effect; set teacher, such as a finished run")
    elif table.mode == "reverse_kl" and table.beta != TEACHER["beta"].default:
        yield Problem(("teacher", "beta"), 'has no effect; set mode = "jsd"')
    unrewarded = [n for n, own in enumerate(by_source(config).values()) if own.reward.reward == NO_REWARD]
    for number in unrewarded:
        if not (table.teacher or (config.data.source and config.data.source[number].teacher)):
            where: Location = (*SOURCES, number, "teacher") if config.data.source else ("reward", "reward")
            what = f'the reward is "{NO_REWARD}", so there is nothing to learn from; set [teacher].teacher'
            yield Problem(where, what)
    if unrewarded and config.data.refill != "none":
        what = f'got "{config.data.refill}", but there are no rewards; needs "none"'
        yield Problem(("data", "refill"), what)
    if table.refresh and "self" not in teachers:
        yield Problem(("teacher", "refresh"), 'got true; only teacher = "self" can follow the policy')
    fields = {"prompt": "", "answer": ""} | ({"feedback": ""} if plays_episodes(config) else {})
    try:
        table.prompt.format(**fields)
    except (LookupError, ValueError, AttributeError) as error:
        why = f"{error}; its fields are {', '.join(f'{{{name}}}' for name in fields)}"
        if "feedback" not in fields:
            why += ", and {feedback} with an [environment]"
        what = f"got {quote(table.prompt)}: {why}; a brace itself is written twice"
        yield Problem(("teacher", "prompt"), what)


def _check_ratio_cap(draft: Draft) -> Iterator[Problem]:
    table = draft.config.algorithm
    if not draft.is_sound("algorithm.ratio_cap"):
        return
    if 0 < table.ratio_cap < 1:
        what = f"got {table.ratio_cap:g}; needs 0 (no limit) or at least 1, the ratio of equal policies"
        yield Problem(("algorithm", "ratio_cap"), what)
    if table.ratio_cap and table.loss_mode == "gspo" and table.ratio_cap_scope == "token":
        what = 'got "token"; "gspo" has one ratio per rollout, needs "sequence"'
        yield Problem(("algorithm", "ratio_cap_scope"), what)


def _check_back_pressure(draft: Draft) -> Iterator[Problem]:
    table, batch = draft.config.backpressure, draft.config.training.batch_size
    smallest, largest = table.min_batch_size, table.max_batch_size
    if not draft.is_sound("backpressure.min_batch_size", "backpressure.max_batch_size"):
        return
    at = ("backpressure", "max_batch_size")
    if largest < smallest:
        yield Problem(at, f"got {largest}, below min_batch_size = {smallest}; raise one or lower the other")
    elif table.enabled and not smallest <= batch <= largest and draft.is_sound("training.batch_size"):
        bounds = f"min_batch_size = {smallest} to max_batch_size = {largest}"
        yield Problem(at, f"training.batch_size = {batch} is outside {bounds}; widen them")


def _check_warm_up(draft: Draft) -> Iterator[Problem]:
    """Check that steps and path come together.

    `steps = 0` written down is a decision (a condition may leave the warm-up out); forgotten is a mistake.
    """
    table, at = draft.config.warmup, ("warmup", "path")
    if not draft.is_sound("warmup.steps", "warmup.path") or not (table.steps or table.path):
        return
    if not table.path:
        yield Problem(at, f"steps = {table.steps} needs a JSONL file of completions")
    elif "steps" not in table_at(draft.tables, "warmup"):
        what = "is not given, so path has no effect; set it, 0 for no updates"
        yield Problem(("warmup", "steps"), what)
    elif table.steps and draft.plugin_problems is not None and draft.is_sound("backend"):
        from retrain.base.json_lines import read_demonstrations  # not at the top: few files have a warm-up

        backend = draft.config.backend
        try:
            rows = read_demonstrations(table.path)
        except ConfigError as error:
            yield from (Problem(at, registry.read_problem(problem).what) for problem in error.problems)
            return
        talks = next((row.prompt.id for row in rows if row.prompt.messages), None)
        is_built_in = registry.is_built_in("backends", backend.backend)
        if talks is not None and is_built_in and not backend.options.get("chat_template"):
            what = (
                f"{table.path}:{talks}: a conversation needs a chat template: [backend.options] "
                "chat_template = true (backends local and tinker); a row with a single user message does not"
            )
            yield Problem(at, what)


def _check_environment(draft: Draft) -> Iterator[Problem]:
    """Check that `discount` is not set without `turn_reward`, whose default may be written down."""
    environment = draft.tables.get("environment")
    if not isinstance(environment, Mapping) or not draft.is_sound("environment"):
        return
    if "discount" in environment and "turn_reward" not in environment:
        what = 'has no effect; set turn_reward, "sum" to discount rewards'
        yield Problem(("environment", "discount"), what)
    elif draft.config.environment.threads and draft.config.environment.processes:
        yield Problem(("environment", "threads"), "has no effect; with processes, functions run there")


def with_eval_tables(raw: Tables) -> Tables:
    """Return a file's tables with `[[eval]]` as `eval.tables`, where a run.toml has it."""
    evals = raw.get("eval")
    if evals is None or (isinstance(evals, dict) and "tables" in evals):
        return raw
    return {**raw, "eval": {"tables": evals}}


def check_eval_tables(draft: Draft) -> Iterator[Problem]:
    """Check each table by itself and against the others, and the plugins that it names."""
    names = Counter(table.name for table in draft.config.eval.tables)
    for number, table in enumerate(draft.config.eval.tables):
        at = (*EVALS, number)
        if not draft.is_sound(".".join(map(str, at))):
            continue
        yield from (Problem((*at, key), what) for key, what in _eval_problems(table, names))
        yield from _own_plugin_problems(draft, table, at)


def _own_plugin_problems(draft: Draft, table: EvalSection | SourceSection, at: Location) -> Iterator[Problem]:
    """Check the plugins that a table of a list names in place of the run's, and their parameters."""
    kind: Any = type(table)
    for key in keys_of(kind).values():
        if not key.plugin:
            continue
        name, params = getattr(table, key.name), getattr(table, key.params)
        if name:
            at_params = (*at, key.params)
            yield from plugin_problems(draft, key.plugin, name, params, (*at, key.name), at_params)
        elif params:
            of = "parameters" if key.params == "params" else "options"
            yield Problem((*at, key.params), f"has no effect; set {key.name}, whose {of} they are")


def _check_sources(draft: Draft) -> Iterator[Problem]:
    """Check each `[[data.source]]` by itself and against the others, and the plugins that it names."""
    data, longest = draft.config.data, draft.config.training.max_tokens
    names = Counter(source.label for source in data.source)
    if data.source and draft.is_sound("data") and (data.task != TASK.default or data.options):
        what = "has no effect beside [[data.source]]; make it one of them, or set source = []"
        yield Problem(("data", "task" if data.task != TASK.default else "options"), what)
    for number, source in enumerate(data.source):
        at = (*SOURCES, number)
        if not draft.is_sound(".".join(map(str, at))):
            continue
        yield from (Problem((*at, key), what) for key, what in _source_problems(source, names))
        yield from _own_plugin_problems(draft, source, at)
        if draft.is_sound("training.max_tokens") and (source.max_tokens or 0) > longest:
            what = f"got {source.max_tokens}; needs at most training.max_tokens = {longest}"
            yield Problem((*at, "max_tokens"), what)


def _source_problems(source: SourceSection, names: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    until = source.until_step
    if not source.task:
        yield "task", "is not given; name the task of its prompts"
    elif not EVAL_NAME.fullmatch(source.label):
        yield "name", f'got "{source.label}"; needs lower-case letters, digits, _ or -, such as "hard"'
    elif names[source.label] > 1:
        yield "name", f'"{source.label}" names {names[source.label]} sources; give each a name of its own'
    if until is not None and until < source.from_step:
        yield "until_step", f"got {until}; needs at least from_step = {source.from_step}"


def check_evals_of_conditions(file: Draft, runs: Sequence[Draft]) -> Iterator[Problem]:
    """Check that evaluations sample no more tokens than a condition may, and are scored."""
    limits = [run.config.training.max_tokens for run in runs if run.is_sound("training.max_tokens")]
    is_scored = all(run.config.reward.reward != NO_REWARD or plays_episodes(run.config) for run in runs)
    for number, table in enumerate(file.config.eval.tables if limits else ()):
        at, most = (*EVALS, number), min(limits)
        if not file.is_sound(".".join(map(str, at))):
            continue
        if table.max_tokens and table.max_tokens > most:
            least = ", the least of the conditions" if len(set(limits)) > 1 else ""
            what = f"got {table.max_tokens}; needs at most training.max_tokens = {most}{least}"
            yield Problem((*at, "max_tokens"), what)
        if not (is_scored or table.reward or table.environment or file.config.data.source):
            what = f'is that of a condition, which is "{NO_REWARD}"; give it one of its own, such as "match"'
            yield Problem((*at, "reward"), what)


def _eval_problems(table: EvalSection, names: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    if not EVAL_NAME.fullmatch(table.name):
        yield "name", f'got "{table.name}"; needs lower-case letters, digits, _ or -, such as "hard"'
    elif names[table.name] > 1:
        yield "name", f'"{table.name}" names {names[table.name]} evaluations; give each a name of its own'
    if 0 < table.temperature < COLDEST:
        yield "temperature", f"got {table.temperature:g}; needs 0, the likeliest token, or at least {COLDEST}"
    if table.samples > 1 and not table.temperature:
        what = f"got {table.samples}, which would all be the same; set temperature, or samples = 1"
        yield "samples", what
