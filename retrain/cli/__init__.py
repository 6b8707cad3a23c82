"""The command line: one file per command, arguments in, exit code out.

Commands import what they need when they are called, so that `retrain --help` stays quick.
"""

from __future__ import annotations

from typing import Annotated

import typer

from retrain.cli import (
    calibrate,
    compare,
    doctor,
    explain,
    export,
    init,
    logs,
    plugins,
    report,
    resume,
    run,
    samples,
    schema,
    squeeze,
    status,
    stop,
)

app = typer.Typer(
    name="retrain",
    help="Plan, run and compare reinforcement-learning campaigns for language models.",
    epilog="`retrain FILE.toml` is `retrain run FILE.toml`. Start with: retrain init --template quickstart",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("init")(init.command)
app.command("explain")(explain.command)
app.command("calibrate")(calibrate.command)
app.command("run")(run.command)
app.command("resume")(resume.command)
app.command("stop")(stop.command)
app.command("status")(status.command)
app.command("logs")(logs.command)
app.command("report")(report.command)
app.command("samples")(samples.command)
app.command("compare")(compare.command)
app.command("export")(export.command)
app.command("schema")(schema.command)
app.command("plugins")(plugins.command)
app.command("squeeze")(squeeze.command)
app.command("doctor")(doctor.command)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"retrain {version('retrain')}")
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
