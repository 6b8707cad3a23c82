"""The command line: one file per command, arguments in, exit code out.

A command is imported when it is asked for, and imports what it needs when it is called.
"""

from __future__ import annotations

from typing import Annotated

import typer

from retrain.cli._lazy import HELP, Commands

app = typer.Typer(
    name="retrain",
    cls=Commands,
    help="Plan, run and compare reinforcement-learning campaigns for language models.",
    epilog="`retrain FILE.toml` is `retrain run FILE.toml`. Start with: retrain init --template quickstart",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from retrain.distribution import version

        typer.echo(f"retrain {version()}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and leave.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Plan, run and compare reinforcement-learning campaigns for language models."""
    del debug, version  # `retrain.__main__` reads --debug where it catches errors
