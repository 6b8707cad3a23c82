"""`[[eval]]`: evaluations that are not the reward, read and checked.

A `Config` holds them as one section, `eval`, with a list of tables; run.toml writes `[[eval.tables]]`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from retrain.base.errors import Location, Problem
from retrain.config.campaign import COLDEST, EvalSection
from retrain.config.checks import plugin_problems
from retrain.config.drafts import Draft
from retrain.config.keys import Tables, keys_of

TABLES: Location = ("eval", "tables")
NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")  # of a file and a field on every system


def with_eval_tables(raw: Tables) -> Tables:
    """Return a file's tables with `[[eval]]` as `eval.tables`, where a run.toml has it."""
    given = raw.get("eval")
    if given is None or (isinstance(given, dict) and "tables" in given):
        return raw
    return {**raw, "eval": {"tables": given}}


def check_eval_tables(draft: Draft) -> Iterator[Problem]:
    """Check each table by itself and against the others, and the plugins that it names."""
    names = Counter(table.name for table in draft.config.eval.tables)
    for number, table in enumerate(draft.config.eval.tables):
        at = (*TABLES, number)
        if not draft.is_sound(".".join(map(str, at))):
            continue
        yield from (Problem((*at, key), what) for key, what in _problems(table, names))
        for key in keys_of(EvalSection).values():
            if key.plugin and (name := getattr(table, key.name)):
                params, where = getattr(table, key.params), (*at, key.params)
                yield from plugin_problems(draft, key.plugin, name, params, (*at, key.name), where)


def check_eval_tokens(file: Draft, runs: Sequence[Draft]) -> Iterator[Problem]:
    """Check that no evaluation samples more tokens than a condition does, whose limit is the backend's."""
    limits = [run.config.training.max_tokens for run in runs if run.is_sound("training.max_tokens")]
    for number, table in enumerate(file.config.eval.tables if limits else ()):
        at, most = (*TABLES, number), min(limits)
        if file.is_sound(".".join(map(str, at))) and table.max_tokens and table.max_tokens > most:
            least = ", the least of the conditions" if len(set(limits)) > 1 else ""
            what = f"got {table.max_tokens}; needs at most training.max_tokens = {most}{least}"
            yield Problem((*at, "max_tokens"), what)


def _problems(table: EvalSection, names: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    if not NAME.fullmatch(table.name):
        yield "name", f'got "{table.name}"; needs lower-case letters, digits, _ or -, such as "hard"'
    elif names[table.name] > 1:
        yield "name", f'"{table.name}" names {names[table.name]} evaluations; give each a name of its own'
    yield from _unread(table)
    if 0 < table.temperature < COLDEST:
        yield "temperature", f"got {table.temperature:g}; needs 0, the likeliest token, or at least {COLDEST}"
    if table.samples > 1 and not table.temperature:
        what = f"got {table.samples}, which would all be the same; set temperature, or samples = 1"
        yield "samples", what


def _unread(table: EvalSection) -> Iterator[tuple[str, str]]:
    if table.options and not table.task:
        yield "options", "would not be read; set task, whose options they are"
    if table.params and not table.reward:
        yield "params", "would not be read; set reward, whose parameters they are"
    if table.environment_options and not table.environment:
        yield "environment_options", "would not be read; set environment, whose options they are"
