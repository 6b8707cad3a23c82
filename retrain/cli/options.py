"""Arguments that several commands take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from retrain.cli import completion

ConfigFile = Annotated[Path, typer.Argument(metavar="FILE.toml", help="The campaign file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Replace a value of the file; repeat for more.",
        autocompletion=completion.keys,
    ),
]
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory, or its campaign's.")]
RunId = Annotated[
    str, typer.Argument(metavar="RUN-ID", help="Which run of a campaign.", autocompletion=completion.runs)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the same rows as JSON.")]
Detach = Annotated[
    bool, typer.Option("--detach", help="Leave it running in the background, and return at once.")
]

Force = Annotated[bool, typer.Option("--force", help="Replace a file that retrain did not write.")]


def permission(force: bool) -> Callable[[str], bool]:
    """Return what decides whether somebody else's file may be replaced: --force, or else the user."""

    def may_replace(what: str) -> bool:
        if force or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return force
        return typer.confirm(f"{what}: exists, and retrain did not write it; replace?", err=True)

    return may_replace


def duration(text: str, option: str) -> float:
    """Read a time span in seconds; a wrong one is bad usage of `option`."""
    from retrain.plan.estimate.durations import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
