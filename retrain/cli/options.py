"""Arguments that several commands take, and how a shell completes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer


def complete_keys(incomplete: str) -> list[str]:
    """Return the keys that begin so, for `--set`."""
    from retrain.config.reference import sections

    found = [f"{section.name}.{key.name}=" for section in sections() for key in section.keys]
    return [key for key in found if key.startswith(incomplete) and not key.startswith("[")]


def complete_runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the runs that begin so, of the campaign named before."""
    folder = Path(ctx.params.get("directory") or ".") / "runs"
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(incomplete))


ConfigFile = Annotated[Path, typer.Argument(metavar="FILE.toml", help="The campaign file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a value of the file; repeatable.",
        autocompletion=complete_keys,
    ),
]
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory, or its campaign's.")]
RunId = Annotated[
    str, typer.Argument(metavar="RUN-ID", help="Which run of a campaign.", autocompletion=complete_runs)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the same rows as JSON.")]
Detach = Annotated[bool, typer.Option("--detach", help="Run it in the background and return immediately.")]

Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that retrain did not write.")]


def permission(force: bool) -> Callable[[str], bool]:
    """Return what decides whether a foreign file may be overwritten: --force, else the user."""

    def may_replace(what: str) -> bool:
        if force or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return force
        return typer.confirm(f"{what}: exists, and retrain did not write it; overwrite?", err=True)

    return may_replace


def duration(text: str, option: str) -> float:
    """Read a time span in seconds; an invalid one is a usage error of `option`."""
    from retrain.plan.durations import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error
