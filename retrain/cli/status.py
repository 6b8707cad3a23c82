"""`retrain status`: which runs are done, running, failed or pending."""

from __future__ import annotations

import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import typer
from typer import Argument, Option

from retrain.base.errors import ConfigError
from retrain.cli import AsJson, Per
from retrain.records.windows import LAST, STEPS, Window, read_window


def command(
    where: str = Argument(
        "logs", metavar="DIR", help="A log directory, a campaign or a run; or the address of a copy."
    ),
    watching: bool = Option(False, "--watch", "-w", help="Keep the view up to date; q or Ctrl-C quits."),
    over: str = Option(
        LAST,
        "--over",
        metavar="FROM:TO|whole|last",
        help="Rewards are means over this part of each run, as in `retrain compare`; last: a tenth of its "
        "steps, at least ten.",
    ),
    per: Per = STEPS,
    as_json: AsJson = False,
) -> None:
    """Show campaigns and their runs: state, progress, rewards, time left. Reads files only.

    With --watch and --json: a line for each campaign, run or event that changed, until all runs have ended.
    Of a copy (`[logging].mirror`) the records are downloaded first, without checkpoints.

    Examples: retrain status logs --watch; retrain status logs --over 1:200;
    retrain status s3://bucket/prefix
    """
    from retrain.cli.render.tables import BAD, console, print_result
    from retrain.records.mirror import as_address, download_records, is_address

    if is_address(where) and watching:
        raise typer.BadParameter("a copy is shown as it is now; leave out --watch", param_hint="DIR")
    directory = download_records(where) if is_address(where) else Path(where)
    out, window = console(), read_window(per, over)
    if watching:
        if window != Window():
            raise ConfigError("--watch shows the last steps of each run: leave it out, or --over and --per")
        from retrain.cli.render.watch import JsonLines, PlainLines, watch_as_lines, watch_on_screen

        if not as_json and out.is_terminal and not out.is_dumb_terminal:
            raise typer.Exit(watch_on_screen(directory, out))
        show = (JsonLines() if as_json else PlainLines(out, directory)).show
        raise typer.Exit(watch_as_lines(directory, show))
    from retrain.cli.render.status import show_all
    from retrain.records.layout import unread_campaigns
    from retrain.records.text import as_typed, plain
    from retrain.results.status import survey

    average = None
    if window != Window():
        from retrain.results.report.sides import averaged  # reads whole histories

        average = partial(averaged, window)
    campaigns, left_out = survey(directory, average=average), unread_campaigns(directory)
    if is_address(where):
        here = plain(as_typed(directory), 4000)
        campaigns = tuple(
            replace(each, resume_with=each.resume_with.replace(here, shlex.quote(as_address(where))))
            for each in campaigns
        )
    if as_json:
        print_result(campaigns, "campaigns", left_out=left_out)
    elif campaigns:
        for line in left_out:
            out.print(line, style=BAD, soft_wrap=True)
        show_all(campaigns, out)
    else:
        typer.echo(f"{directory}: no campaigns yet; start one with `retrain FILE.toml`")
