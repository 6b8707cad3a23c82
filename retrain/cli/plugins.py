"""`retrain plugins`: what can be named in a file, and what each needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from retrain.cli import completion
from retrain.cli.options import AsJson


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One plugin; nothing of it was imported."""

    kind: str
    name: str
    summary: str  # empty for those that other packages bring
    extra: str  # what it needs beyond the core, or nothing
    keys: tuple[str, ...]  # environment variables, one of which must hold a key
    installed: bool
    install: str  # the command, if it is not installed


def command(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="Only these, such as rewards.", autocompletion=completion.plugin_kinds
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List tasks, rewards, backends and so on, and what each of them needs.

    A dotted path to a function of yours works wherever a name does.

    Example: retrain plugins rewards
    """
    from retrain import registry
    from retrain.errors import ConfigError
    from retrain.render.tables import console, print_json, table

    if kind and kind not in registry.KINDS:
        raise ConfigError(f"{kind!r} is no kind of plugin; known: {', '.join(registry.KINDS)}")
    kinds = [kind] if kind else list(registry.KINDS)
    rows = [plugin_row(k, name) for k in kinds for name in registry.names(k)]
    if as_json:
        print_json(rows)
        return
    for k in kinds:
        cells = [(row.name, row.summary, _needs(row)) for row in rows if row.kind == k]
        console().print(table(k, ("name", "what it is", "needs"), cells))


def plugin_row(kind: str, name: str) -> PluginRow:
    """Describe a plugin from its source."""
    from retrain.extras import needs, summary

    wanted = needs(kind, name)
    installed = not wanted.missing()
    return PluginRow(
        kind,
        name,
        summary(kind, name),
        wanted.extra,
        wanted.keys,
        installed,
        "" if installed else wanted.command,
    )


def _needs(row: PluginRow) -> str:
    parts = [row.install or (f"[{row.extra}], installed" if row.extra else "")]
    parts += [f"key: {' or '.join(row.keys)}"] if row.keys else []
    return "; ".join(part for part in parts if part)
