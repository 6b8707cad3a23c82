"""`retrain status`: what ran, how it went, what is running, what is left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.options import AsJson


def command(
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="A log directory, or one campaign.")
    ] = Path("logs"),
    as_json: AsJson = False,
) -> None:
    """Show campaigns: finished, running, failed, and what is left. Reads files only.

    Example: retrain status logs
    """
    from retrain.render.overview import show_all
    from retrain.render.tables import console, print_json
    from retrain.status.survey import survey

    campaigns = survey(directory)
    if as_json:
        print_json(campaigns)
    elif campaigns:
        show_all(campaigns, console())
    else:
        typer.echo(f"{directory}: no campaigns yet; start one with `retrain FILE.toml`")
