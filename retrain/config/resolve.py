"""One run's own configuration and label: the file, a condition's overrides and a seed, without loss.

And what a campaign's launcher says about itself: where workers run, and which keys it does not use.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import re
import unicodedata
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import cache
from types import NoneType
from typing import Any, TypeVar, cast, get_args

from retrain.base import registry
from retrain.base.errors import ConfigError, Location
from retrain.config import schema
from retrain.config.flow import overlapping
from retrain.config.keys import Key, Table, Tables, keys_of
from retrain.config.schema import (
    CampaignSection,
    ConditionSection,
    Config,
    EnvironmentSection,
    EvalSection,
    SourceSection,
)

T = TypeVar("T")
SCALARS = (str, int, float, NoneType)
LONGEST_LABEL = 40
TAG_LENGTH = 6  # hex digits that distinguish labels which shortening made equal


@cache  # slow, and a campaign builds a config per run
def hints_of(kind: Any) -> dict[str, Any]:
    """Return the types of a table's keys, in the order of their declaration."""
    return {name: _type_of(key.annotation) for name, key in keys_of(kind).items()}


@cache  # most keys share a few types, and `get_type_hints` would evaluate each key's
def _type_of(annotation: str) -> Any:
    return eval(annotation, vars(schema))


@cache
def sections_of(kind: Any) -> dict[str, Any]:
    """Map the keys of a table that are tables themselves to their classes."""
    sections = {}
    for key, hint in hints_of(kind).items():
        section = next((c for c in (hint, *get_args(hint)) if dataclasses.is_dataclass(c)), None)
        if isinstance(section, type):
            sections[key] = section
    return sections


SECTIONS = sections_of(Config)
RUN_SECTIONS = tuple(name for name in SECTIONS if name in keys_of(ConditionSection))  # conditions override
SHORTHANDS = {name: key.stands_for for name, key in keys_of(ConditionSection).items() if key.stands_for}
DECIDED_BY_CAMPAIGN = {key.stands_for: name for name, key in keys_of(CampaignSection).items()}  # "": the rest
PLUGINS = tuple(  # the keys that name a run's plugins, each with its section
    (section, key) for section in RUN_SECTIONS for key in keys_of(SECTIONS[section]).values() if key.plugin
)
# A condition that names another plugin starts with that plugin's defaults, not with the file's
# parameters for a different one.
PARAMS_OF = {key.name: key.params for _, key in PLUGINS}


def overrides_of(condition: Tables) -> Table:
    """Return a raw condition's overrides as sections, with its shorthands expanded."""
    sections = {k: v for k, v in condition.items() if k in RUN_SECTIONS and v != {}}
    for short, dotted in SHORTHANDS.items():
        section, _, key = dotted.partition(".")
        table = sections.get(section, {})
        if condition.get(short) is not None and isinstance(table, dict):
            sections[section] = {key: condition[short], **table}
    return sections


def with_default_plugins(raw: Tables) -> Table:
    """Return a file's tables of runs with their default plugins written out.

    So a condition that names another plugin is known to replace the default one.
    """
    spelled = {name: table for name, table in raw.items() if name in RUN_SECTIONS or name not in SECTIONS}
    for section, key in PLUGINS:
        table = spelled.get(section, {})
        if isinstance(table, dict):
            spelled[section] = {key.name: key.default, **table}
    return spelled


def merge(base: Tables, overrides: Tables) -> Table:
    """Return tables with others laid over them, key by key; a replaced plugin loses its parameters."""
    merged = dict(base)
    for key, value in overrides.items():
        below = merged.get(key)
        if key in PARAMS_OF and isinstance(value, str) and isinstance(below, str) and below != value:
            merged[PARAMS_OF[key]] = {}
    for key, value in overrides.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def resolve(config: Config, condition: ConditionSection | None, seed: int) -> Config:
    """Return the configuration of one run: no campaign, its own seed, every value explicit.

    A single source is the task of `[data]`, as if the file had said so. Sections that nothing overrides are
    the file's own, so that those of thousands of conditions are one.
    """
    changes = overrides_of(vars(condition)) if condition is not None else {}
    if condition is not None and config.rate_limiter.max_staleness == 0:
        changes = overlapping(changes)
    training = {**changes.get("training", {}), "seed": seed}
    if config.campaign is not None and config.campaign.max_steps is not None:
        training = {"max_steps": config.campaign.max_steps, **training}
    sections = {
        name: build(SECTIONS[name], merge(vars(getattr(config, name)), table))
        for name, table in {**changes, "training": training}.items()
    }
    resolved = dataclasses.replace(config, campaign=None, decision=None, **sections)
    return of_source(resolved, *resolved.data.source) if len(resolved.data.source) == 1 else resolved


def of_source(config: Config, source: SourceSection) -> Config:
    """Return the configuration of a run that has one of its sources only."""
    data = dataclasses.replace(config.data, task=source.task, options=source.options, source=[])
    training = dataclasses.replace(
        config.training, max_tokens=source.max_tokens or config.training.max_tokens
    )
    reward = config.reward
    if source.reward:
        reward = dataclasses.replace(reward, reward=source.reward, params=source.params)
    teacher = config.teacher
    if source.teacher:
        teacher = dataclasses.replace(teacher, teacher=source.teacher)
    return dataclasses.replace(
        as_played(config, source), data=data, training=training, reward=reward, teacher=teacher
    )


def by_source(config: Config) -> dict[str, Config]:
    """Return the configuration of each source of a run by its name; without sources, its own of no name."""
    sources = {source.label: of_source(config, source) for source in config.data.source}
    return sources or {"": config}


def teachers_of(config: Config) -> dict[str, Location]:
    """Return what a run's completions learn from, each with the key that names it first; none without any."""
    sources = [("data", "source", number, "teacher") for number in range(len(config.data.source))]
    named: list[tuple[Location, str]] = [(("teacher", "teacher"), config.teacher.teacher)]
    named += zip(sources, (source.teacher for source in config.data.source), strict=True)
    return {name: where for where, name in reversed(named) if name}


def environments_of(config: Config) -> list[EnvironmentSection]:
    """Return what the prompts of a run's steps are played in."""
    return [one.environment for one in by_source(config).values()]


def plays_episodes(config: Config) -> bool:
    """Whether some of the rollouts of a run's steps are episodes."""
    return not longest_played(config).is_single_turn


def longest_played(config: Config) -> EnvironmentSection:
    """Return what prompts of a run's steps are played in; of several, one whose rollouts may be longest."""
    return max(environments_of(config), key=lambda table: 0 if table.is_single_turn else table.max_turns)


def as_played(config: Config, table: EvalSection | SourceSection) -> Config:
    """Return the configuration of a run with the environment of an evaluation or a source, if it has one."""
    if not table.environment:
        return config
    environment = dataclasses.replace(
        config.environment, environment=table.environment, options=table.environment_options
    )
    return dataclasses.replace(config, environment=environment)


def build(kind: type[T], table: Tables) -> T:
    """Build a section from tables that have been checked (unknown keys are TypeErrors)."""
    sections = sections_of(cast(Hashable, kind))
    return kind(
        **{key: _built(sections[key], value) if key in sections else value for key, value in table.items()}
    )


def _built(kind: Any, value: Any) -> Any:
    if isinstance(value, list):
        return [_built(kind, one) for one in value]
    return build(kind, value) if isinstance(value, dict) else value


@cache
def deciding_keys(kind: Any) -> tuple[Key, ...]:
    """Return the keys of a table that can change a run's result."""
    return tuple(key for key in keys_of(kind).values() if key.affects == "result")


def values_of(
    config: Config, keys: Callable[[Any], Iterable[Key]] = lambda kind: keys_of(kind).values()
) -> Iterator[tuple[str, Key, Any]]:
    """Iterate over the keys of a configuration, or over some of each table's: section, key, value."""
    for section, kind in SECTIONS.items():
        if (table := getattr(config, section)) is not None:
            for key in keys(kind):
                yield section, key, plain_value(getattr(table, key.name))


def as_tables(config: Config) -> Table:
    """Return a run's configuration as TOML tables, without absent values."""
    tables = {name: getattr(config, name) for name in SECTIONS}
    return {
        name: {key: plain_value(value) for key, value in vars(table).items() if value is not None}
        for name, table in tables.items()
        if table is not None
    }


def plain_value(value: Any) -> Any:
    """Return a value as TOML holds it: of tables in a list, the keys that differ from their defaults."""
    if isinstance(value, SCALARS):  # first: most are, and a sweep has a million
        return value
    if value in ({}, []):
        return type(value)()
    if isinstance(value, list):
        return [plain_value(one) for one in value]
    if dataclasses.is_dataclass(value):
        kind: Any = type(value)
        keys = keys_of(kind)
        return {name: found for name, found in vars(value).items() if found != keys[name].default}
    return copy.deepcopy(value)


# scripts that words share with Latin, whose letters mostly do not look like it
_BESIDE_LATIN = {"LATIN", "GREEK", "CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO"}


def label_of(name: str) -> str:
    """Return a label that is safe as part of a file name: [a-z0-9+._-], at most `LONGEST_LABEL` long."""
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    label = re.sub(r"[^a-z0-9+._-]+", "-", ascii_name).strip(".-") or "condition"
    if len(label) <= LONGEST_LABEL and ascii_name == name.lower():
        return label
    tag = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:TAG_LENGTH]
    return f"{label[: LONGEST_LABEL - TAG_LENGTH - 1]}-{tag}"


def skeleton_of(name: str) -> str:
    """Return what a reader sees of a name: its compatibility form (NFKC), in any case, of what is printed."""
    return "".join(filter(str.isprintable, unicodedata.normalize("NFKC", name).casefold()))


def scripts_mixed_in(name: str) -> list[str]:
    """Return the scripts of the first word whose letters can be taken for each other's; none without one.

    Latin stands beside Greek and East Asian letters in one word, as in Unicode TR39's restriction levels.
    """
    for word in re.findall(r"[^\W\d_]+", unicodedata.normalize("NFKC", name)):
        letters = (letter for letter in word if unicodedata.category(letter) != "Lm")
        scripts = {unicodedata.name(letter, "UNNAMED").split()[0] for letter in letters}
        if len(scripts) > 1 and not scripts <= _BESIDE_LATIN:
            return sorted(script.capitalize() for script in scripts)
    return []


def label_of_modes(advantage_mode: str, transform_mode: str) -> str:
    """Return the label of a condition without a name: its two modes."""
    modes = [mode.rpartition(".")[2] for mode in (advantage_mode, transform_mode) if mode != "none"]
    return label_of("+".join(modes))


def flatten(
    tables: Tables, is_value: Callable[[Tables], bool] = lambda _: False, above: str = ""
) -> Iterator[tuple[str, Any]]:
    """Iterate over every value with its dotted key; a table is one only if `is_value` says so."""
    for key, value in tables.items():
        if isinstance(value, Mapping) and not is_value(value):
            yield from flatten(value, is_value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def options_of(campaign: CampaignSection) -> Tables:
    """Return the table `[campaign.<launcher>]`; empty for a launcher that has none."""
    table = getattr(campaign, campaign.launcher, None)
    if dataclasses.is_dataclass(table) and not isinstance(table, type):
        return dataclasses.asdict(table)
    return dict(campaign.launcher_options)


def runs_here(campaign: CampaignSection | None) -> bool:
    """Whether workers start at once on this machine, whose memory they take; so does a file's only run."""
    campaign = campaign or CampaignSection()
    return bool(registry.ask("launchers", campaign.launcher, "runs_here", options_of(campaign)))


def runs_side_by_side(campaign: CampaignSection) -> bool:
    """Whether several workers can run at a time on this machine."""
    return runs_here(campaign) and "parallel" not in unused_keys(campaign)


def unused_keys(campaign: CampaignSection) -> Mapping[str, str]:
    """Return the keys of `[campaign]` that its launcher does not use, each with the reason.

    Raises ConfigError if the launcher names a key that does not exist.
    """
    options = options_of(campaign)
    reasons: Mapping[str, str] = registry.ask("launchers", campaign.launcher, "unused_keys", options)
    names = {one.name for one in dataclasses.fields(campaign)}
    if wrong := [key for key in reasons if key not in names]:
        hint = registry.hint(wrong[0], names, "correct the name")
        raise ConfigError(f"{campaign.launcher!r}: unused_keys: [campaign] has no key {wrong[0]!r}; {hint}")
    return reasons
