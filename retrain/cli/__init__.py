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
app.command("init", short_help="Write a commented file to start from.")(init.command)
app.command("explain", short_help="Check a file, and say how long it would take.")(explain.command)
app.command("calibrate", short_help="Size a campaign by short real runs.")(calibrate.command)
app.command("run", short_help="Run every condition with every seed.")(run.command)
app.command("resume", short_help="Go on with a campaign that was stopped or killed.")(resume.command)
app.command("stop", short_help="Have a campaign's workers save and leave.")(stop.command)
app.command("status", short_help="Show what runs, ran and is left.")(status.command)
app.command("logs", short_help="Show what a run printed.")(logs.command)
app.command("report", short_help="Make one HTML file of a campaign.")(report.command)
app.command("samples", short_help="Show what a run's policy wrote.")(samples.command)
app.command("compare", short_help="Say which condition is better, if the seeds tell.")(compare.command)
app.command("export", short_help="Write all steps of all runs as one table.")(export.command)
app.command("schema", short_help="Print the JSON Schema of a campaign file.")(schema.command)
app.command("plugins", short_help="List tasks, rewards, backends and what they need.")(plugins.command)
app.command("squeeze", short_help="Make a LoRA adapter smaller.")(squeeze.command)
app.command("doctor", short_help="Say what is missing here, and how to get it.")(doctor.command)


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
