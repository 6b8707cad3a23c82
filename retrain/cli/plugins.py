"""`retrain plugins`: what a file can name, and what each plugin needs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter
from threading import Event, Thread

import typer
from typer import Argument, Option

from retrain.base import registry
from retrain.base.errors import EXIT_CONFIG, ConfigError
from retrain.base.extras import needs, summary
from retrain.cli import AsJson

SILENT_S, AGAIN_S = 3.0, 10.0  # of a check, before it is named first, and again


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One plugin, described without importing what it needs."""

    kind: str
    name: str
    summary: str  # empty for those that other packages bring
    extra: str  # what it needs beyond the core, or nothing
    keys: tuple[str, ...]  # environment variables, or files as `~/...`, one of which must hold a key
    installed: bool
    install: str  # the command, if it is not installed


def command(
    kind: str = Argument(
        "", metavar="KIND", help="Only this kind, such as rewards.", autocompletion=lambda: registry.KINDS
    ),
    check: str = Option(
        "", "--check", metavar="NAME", help="Check your own plugin, such as my_rewards.score."
    ),
    overrides: list[str] | None = Option(
        None, "--set", metavar="KEY=VALUE", help="With --check: a key of the plugin's table."
    ),
    as_json: AsJson = False,
) -> None:
    """List the plugins and what each needs, or check your own.

    The dotted path of your own function works wherever a name does.

    Example: retrain plugins --check my_rewards.score --set bonus=0.1
    """
    from retrain.cli.render.tables import print_result, print_wrapped

    if kind and kind not in registry.KINDS:
        fix = registry.hint(kind, registry.KINDS, f"known: {', '.join(registry.KINDS)}")
        raise ConfigError(f"{kind!r} is not a kind of plugin; {fix}")
    if check or overrides:
        _try_out(check, kind, overrides or (), as_json)
        return
    kinds = (kind,) if kind else registry.KINDS
    rows = [_row(k, name) for k in kinds for name in registry.names(k)]
    if as_json:
        print_result(rows, "plugins")
        return
    for title, of_kind in groupby(rows, key=attrgetter("kind")):
        cells = []
        for row in of_kind:
            package = row.install or (f"[{row.extra}], installed" if row.extra else "")
            key = f"key: {' or '.join(row.keys)}" if row.keys else ""
            cells.append((row.name, row.summary, "; ".join(filter(None, (package, key)))))
        print_wrapped(title, ("name", "what it is", "needs"), cells)


def _row(kind: str, name: str) -> PluginRow:
    plugin = needs(kind, name)
    installed = not plugin.missing()
    install = "" if installed else plugin.command
    return PluginRow(kind, name, summary(kind, name), plugin.extra, plugin.keys, installed, install)


def _try_out(name: str, kind: str, overrides: Sequence[str], as_json: bool) -> None:
    from retrain.campaign.conformance import check_plugin, kinds_of
    from retrain.cli.render.tables import console, print_result
    from retrain.config.load import value_of

    if not name:
        raise ConfigError("--set is for a check; name the plugin with --check NAME")
    table = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override}: not of the form key=value")
        table[key.strip()] = value_of(value)
    ended = Event()  # of the check that runs

    def begins(check: str) -> None:
        nonlocal ended
        ended = this_ended = Event()

        def name_slow() -> None:
            began_s, pause_s = time.monotonic(), SILENT_S
            while not this_ended.wait(pause_s):
                took_s = time.monotonic() - began_s
                typer.echo(f"still checking whether {check}: {took_s:.0f} s so far", err=True)
                pause_s = AGAIN_S

        Thread(target=name_slow, daemon=True).start()

    kinds = [kind] if kind else kinds_of(name)
    for each in kinds:
        registry.plugin(each, name)  # raises if there is none: no check is needed then
    findings = []
    for finding in chain.from_iterable(check_plugin(each, name, table, begins) for each in kinds):
        ended.set()
        findings.append(finding)
        if not as_json:
            result, why = ("FAILED", f": {finding.problem}") if finding.problem else ("ok", "")
            console().print(f"{result}  {finding.check}{why}", soft_wrap=True)
    if as_json:
        print_result(findings, "findings")
    if any(finding.problem for finding in findings):
        raise typer.Exit(EXIT_CONFIG)
