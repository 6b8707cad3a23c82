"""`retrain states`: states that runs have saved at an API."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Argument, Option

from retrain.cli import AsJson


def command(
    directory: Path = Argument(metavar="DIR", help="The campaign's directory."),
    delete: bool = Option(False, "--delete", help="Delete the states that no unfinished run needs."),
    everything: bool = Option(
        False, "--all", help="With --delete: all states; the campaign cannot be resumed."
    ),
    as_json: AsJson = False,
) -> None:
    """Show the states that a campaign has saved at an API, or delete them there.

    States of finished runs are not needed to resume, but they are the trained models: `retrain
    publish` what you want to keep first.

    Example: retrain states logs/campaign-20260101T120000Z-1a2b --delete
    """
    from retrain.base.errors import EXIT_RUN_FAILED
    from retrain.campaign.states import delete_states, states_of
    from retrain.cli.render.tables import console, print_result, table
    from retrain.records.text import count_of, first_of

    if everything and not delete:
        raise typer.BadParameter("deletes nothing without --delete", param_hint="--all")
    problems = delete_states(directory, all_of_them=everything) if delete else {}
    states = states_of(directory)
    if as_json:
        print_result(states, "states")
    else:
        rows = [(run.run_id, run.state, str(len(run.paths)), str(len(run.needed))) for run in states]
        console().print(table("", ("run", "state", ">states", ">needed to resume"), rows))
    if delete:
        typer.echo(f"{count_of(list(problems.values()).count(''), 'state')} deleted", err=True)
    for problem in filter(None, dict.fromkeys(problems.values())):
        left = [path for path, why in problems.items() if why == problem]
        typer.echo(f"{first_of(left, 3)}: {problem}", err=True)
    if any(problems.values()):
        raise typer.Exit(EXIT_RUN_FAILED)
