"""`retrain doctor`: what is missing on this machine, or for a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli import AsJson

if TYPE_CHECKING:
    from retrain.config.schema import Config

STYLES = {"ok": "green", "absent": "dim", "warning": "yellow", "missing": "bold red"}


def command(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE.toml", help="Also check what this file needs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check what is installed here and how to install what is missing; with a file, what that file needs.

    Exits with code 2 if something is missing. Keys are checked for, never shown.

    Example: retrain doctor campaign.toml
    """
    from rich.text import Text

    from retrain.cli.doctor.checks import (
        Health,
        core_checks,
        machine_checks,
        plugin_checks,
        server_checks,
        used_plugins,
    )
    from retrain.errors import EXIT_CONFIG
    from retrain.render.tables import console, print_result, table

    configs = _configs(file)
    checks = [
        *core_checks(),
        *plugin_checks(used_plugins(configs)),
        *machine_checks(configs),
        *server_checks(configs),
    ]
    if as_json:
        print_result(checks, "checks")
    else:
        cells = [(c.what, Text(c.verdict, STYLES[c.verdict]), c.found, c.fix) for c in checks]
        console().print(table("", ("check", "verdict", "found", "fix"), cells))
    if any(check.verdict is Health.MISSING for check in checks):
        raise typer.Exit(EXIT_CONFIG)


def _configs(file: Path | None) -> list[Config]:
    if file is None:
        return []
    from dataclasses import replace

    from retrain.config.load import load_config
    from retrain.plan.matrix import plan_runs

    config = load_config(file, try_plugins=False)  # missing plugins are what is checked here
    conditions = {run.condition: run.config for run in plan_runs(config, file.name).runs}
    return [replace(one, campaign=config.campaign) for one in conditions.values()]
