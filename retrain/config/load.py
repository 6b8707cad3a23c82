"""Reads a TOML file into a `Config`, or reports every problem of it at once."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from retrain.base import user_code
from retrain.base.errors import ConfigError, Location, Problem, place
from retrain.config.checks import (
    Draft,
    PluginProblems,
    check_campaign,
    check_environment_is_named,
    check_eval_tables,
    check_evals_of_conditions,
    check_launcher_tables,
    check_logging,
    check_matrix,
    check_plugins,
    check_run,
    draft_of,
    sections_with,
    with_eval_tables,
    with_launcher_options,
)
from retrain.config.files import absolute_inputs, found_below, input_problems, located
from retrain.config.keys import CURRENT, Proposal, Table, Tables, as_meant, as_toml, put, quote, table_at
from retrain.config.prices import check_prices
from retrain.config.resolve import DECIDED_BY_CAMPAIGN, SECTIONS, merge, overrides_of, with_default_plugins
from retrain.config.schema import Config
from retrain.config.sweep import (
    Variant,
    called,
    check_sweep,
    conditions,
    ends_of,
    expanded,
    has_sampler,
    stands_in,
    swept_keys,
    table_of,
    variants,
    with_plain_keys,
)
from retrain.config.toml_files import EXTENDS, locations, naming_bases, read_tables

MOST_ALIKE = 3  # problems of conditions that are listed one by one
CONDITION_NAMED = re.compile(r'(?<=\[\[campaign\.conditions\]\] )(#\d+|"(?:[^"\\]|\\.)*")')


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    try_plugins: bool = True,
    version: int = CURRENT,
    beside: Path | None = None,
    project: Path | None = None,
    proposed: Sequence[Proposal] = (),
) -> Config:
    """Read and check a campaign file.

    Args:
        path: the TOML file.
        overrides: `section.key=value` each, value as in TOML (a bare word is a string); they replace
            what the file says outside its conditions. Their paths are relative to the working directory.
        try_plugins: also build tasks and ask plugins to check their options.
        version: of the keys' meanings; a run.toml contains its own.
        beside: directory that the file's paths are relative to, and where dotted paths are searched first;
            default: that of a run.toml's origin, else the file's.
        project: where absolute paths that are gone are looked for; problems then name the file in full.
        proposed: what the file's sampler has proposed so far.

    Raises:
        ConfigError: every problem of the file and the overrides, one line each.
    """
    path = Path(path)
    merged = read_tables(path)
    raw = merged.tables
    overridden = _apply_overrides(raw, overrides)
    if beside is None and "where" in (origin := table_at(raw, "run", "origin")):
        beside = Path(str(origin["where"])) / str(origin.get("beside", "."))
    if merged.origins and beside and beside.resolve() != path.parent.resolve():
        raise ConfigError(f"{path} {EXTENDS}: a campaign's own file is whole; write the keys into it instead")
    beside = beside or path.parent
    user_code.search_first(beside)
    raw, source = (found_below(raw, project), str(path)) if project else (raw, path.name)
    with naming_bases(path):
        return parse(
            as_meant(raw, version),
            source,
            overridden,
            try_plugins=try_plugins,
            proposed=proposed,
            beside=beside,
        )


def load_types(path: Path, overrides: Sequence[str] = (), proposed: Sequence[Proposal] = ()) -> Config:
    """Read a file and check only types: for readers of a campaign that already runs from it."""
    raw = with_eval_tables(with_launcher_options(load_tables(path, overrides)))
    wrong = list(check_sweep(raw))
    listed = [] if wrong else variants(raw, proposed)
    drafts = [] if wrong else [draft_of(expanded(raw, listed))]
    drafts += [draft for _, draft in _drafts(raw, listed, proposed, draft_of)]
    wrong += chain.from_iterable(draft.mistakes for draft in drafts)
    if wrong:
        raise ConfigError([f"{path} {problem}" for problem in wrong])
    return drafts[0].config


def load_tables(path: Path, overrides: Sequence[str] = ()) -> Table:
    """Read a file's tables as they are, with overrides applied; `load_config` checks them."""
    raw = read_tables(path).tables
    _apply_overrides(raw, overrides)
    return raw


@dataclass(frozen=True)
class ValueOrigin:
    """Where a value of a file that extends others comes from."""

    key: str  # as `[training].lr`
    value: str  # as TOML writes it
    file: str  # from the directory of the campaign's file; "--set" for an override


def value_origins(path: Path, overrides: Sequence[str] = ()) -> tuple[ValueOrigin, ...]:
    """Return where each value comes from; none of a file that extends no other."""
    merged = read_tables(path)
    if not merged.origins:
        return ()
    overridden = _apply_overrides(merged.tables, overrides)
    file_of = {at: name for at, name in merged.origins.items() if at not in overridden}
    rows = []
    for at in locations(merged.tables):
        value: Any = merged.tables
        for key in at:
            value = value[key]
        if not isinstance(value, dict) or not value:
            rows.append(ValueOrigin(place(at), as_toml(value), file_of.get(at, "--set")))
    return tuple(rows)


def sets_key(path: Path, overrides: Sequence[str], section: str, key: str) -> bool:
    """Whether a file, one of its conditions or an override sets a key explicitly."""
    raw = load_tables(path, overrides)
    is_swept = f"{section}.{key}" in swept_keys(table_of(raw))
    return is_swept or any(key in table.get(section, {}) for table in (raw, *conditions(raw)))


def fixed_keys(path: Path, overrides: Sequence[str], keys: Sequence[str]) -> frozenset[str]:
    """Return those of the keys, as `section.key`, that `--set` cannot change, because other keys decide."""
    raw = load_tables(path, overrides)
    locations: dict[Location, str] = {tuple(key.split(".")): key for key in keys}
    wrong = _without_effect(raw, frozenset(locations))
    return frozenset(locations[problem.where] for problem in wrong)


def parse(
    raw: Tables,
    source: str,
    overridden: frozenset[Location] = frozenset(),
    *,
    try_plugins: bool = True,
    proposed: Sequence[Proposal] = (),
    beside: Path | None = None,
) -> Config:
    """Build the Config of raw tables; a ConfigError has one line, `source [section].key: what`, a problem.

    Paths are relative to the directory `beside`; None: to the working directory.
    """

    def shown(problem: Problem) -> str:
        at = problem.where
        is_made_up = len(at) == 1 and at[0] not in SECTIONS and any(key[:1] == at for key in overridden)
        is_set = at in overridden or is_made_up
        return f"--set {'.'.join(map(str, at))}: {problem.what}" if is_set else f"{source} {problem}"

    launcher = list(check_launcher_tables(raw))
    raw = with_eval_tables(with_launcher_options(with_plain_keys(raw)))
    plugin_problems: PluginProblems | None = {} if try_plugins else None

    def locate(tables: Tables) -> Tables:
        return located(tables, beside) if beside else tables

    def draft(tables: Tables) -> Draft:
        return draft_of(tables, plugin_problems)

    file = draft(locate(raw))
    sweep = list(check_sweep(raw))
    listed = [] if sweep else variants(raw, proposed)
    drafts = _drafts(raw, listed, proposed, draft, locate)
    unread = [*launcher, *check_environment_is_named(file, conditions(raw)), *check_eval_tables(file), *sweep]
    problems = [*file.mistakes, *unread, *check_campaign(file), *check_logging(file), *check_prices(file)]
    # what every condition replaces must still be right
    problems += check_plugins(file, by_name=True) if drafts else check_run(file)
    problems += _without_effect(raw, overridden)
    if beside:
        problems += input_problems(raw, beside)
    lines = [*map(shown, problems)]
    lines += chain.from_iterable(_problems_of(variant, draft, source, shown) for variant, draft in drafts)
    named = [(str(variant.table.get("name") or ""), draft) for variant, draft in drafts]
    lines += map(shown, check_matrix(named, is_swept=any(variant.point for variant, _ in drafts)))
    lines += map(shown, check_evals_of_conditions(file, [draft for _, draft in drafts] or [file]))
    if lines:
        raise ConfigError(list(_merged(lines)))
    if file.config.campaign is None or not table_of(raw):
        return file.config
    swept = draft(locate(expanded(raw, listed))).config.campaign
    campaign = replace(file.config.campaign, conditions=swept.conditions if swept else None)
    return replace(file.config, campaign=campaign)


def _merged(lines: Sequence[str]) -> Iterator[str]:
    """Iterate over lines, each once; of those that many conditions share, over the first and their number."""
    alike: dict[str, list[str]] = {}  # by what they say of any condition
    for line in dict.fromkeys(lines):
        alike.setdefault(CONDITION_NAMED.sub("", line, count=1), []).append(line)
    first = {same[0]: same for same in alike.values() if len(same) > MOST_ALIKE}
    merged = {line for same in first.values() for line in same}
    for line in dict.fromkeys(lines):
        if line in first:
            yield f"{line}; the same in {len(first[line]) - 1} more conditions"
        elif line not in merged:
            yield line


def _drafts(
    raw: Tables,
    listed: Sequence[Variant],
    proposed: Sequence[Proposal],
    draft: Callable[[Tables], Draft],
    locate: Callable[[Tables], Tables] = lambda tables: tables,
) -> list[tuple[Variant, Draft]]:
    """Return the conditions, at each point of the sweep, laid over the file.

    Of ranges from which a sampler has yet to propose points, these are their ends as well.
    """
    ends = [end for end in ends_of(raw) if end not in proposed] if listed else []
    tried = [*listed, *(variant for variant in variants(raw, ends) if variant.point)] if ends else listed
    base = locate(with_default_plugins(raw))
    return [(variant, draft(merge(base, locate(overrides_of(variant.table))))) for variant in tried]


def _problems_of(
    variant: Variant, draft: Draft, source: str, shown: Callable[[Problem], str]
) -> Iterator[str]:
    """Iterate over what is wrong with a condition at one point of the sweep, and where that is written."""
    start = f"{source} [[campaign.conditions]] {called(variant.own, variant.number)}"
    for problem in (*draft.mistakes, *check_run(draft)):
        if stands_in(overrides_of(variant.own), problem.where):
            yield f"{start} {problem}"
        else:
            yield shown(Problem(variant.swept(problem.where) or problem.where, problem.what))


def _without_effect(raw: Tables, overridden: frozenset[Location]) -> Iterator[Problem]:
    """Iterate over overrides that have no effect because another key takes precedence."""
    campaign, own, swept = table_at(raw, "campaign"), conditions(raw), swept_keys(table_of(raw))
    drawn = [] if has_sampler(raw) else [tuple(key.split(".")) for key in swept]  # at every point
    for location in sorted(overridden, key=str):
        key = DECIDED_BY_CAMPAIGN.get(".".join(map(str, location)), "")
        if key and campaign.get(key):
            rule = f"campaign.{key} = {quote(campaign[key])}"
            yield Problem(location, f"has no effect, because {rule} decides; set that")
            continue
        if ".".join(map(str, location)) in swept:
            what = f"[campaign.sweep] gives its values; set campaign.sweep.{'.'.join(map(str, location))}"
            yield Problem(location, f"has no effect, because {what}")
            continue
        inside = ("training", "max_steps") if location == ("campaign", "max_steps") else location
        is_drawn = any(key[: len(inside)] == inside for key in drawn)
        if is_drawn or (own and all(stands_in(overrides_of(table), inside) for table in own)):
            what = f"has no effect, because every condition gives its own {place(inside)}"
            yield Problem(location, what)


def _apply_overrides(raw: Table, overrides: Sequence[str]) -> frozenset[Location]:
    """Set the overridden keys in `raw`; return them."""
    problems, done = [], set()
    for text in overrides:
        path, equals, value = text.partition("=")
        keys = tuple(k.strip() for k in path.split("."))
        if not equals or len(keys) < 2 or not all(keys):
            named = [f"{section}.{text.strip()}" for section in sections_with(keys[0]) if equals]
            right = " or ".join(f"--set {each}" for each in named or ["training.lr=1e-4"])
            problems.append(f"--set {text}: not of the form section.key=value; write {right}")
        elif not put(raw, keys, absolute_inputs(value_of(value), ".".join(keys)), replaces=True):
            problems.append(f"--set {text}: {place(keys[:-1])} is not a table that holds {keys[-1]!r}")
        else:
            done.add(keys)
    if problems:
        raise ConfigError(problems)
    return frozenset(done)


def value_of(text: str) -> object:
    """Return an override's value, as in TOML; a bare word is a string."""
    try:
        tables = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return tables["value"] if len(tables) == 1 else text
