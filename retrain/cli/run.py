"""`retrain run`: run a campaign file."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from retrain.base.errors import LaunchError
from retrain.cli import AsJson, BudgetUsd, ConfigFile, Detach, Overrides

if TYPE_CHECKING:
    from retrain.campaign.orchestrate import Campaign, CampaignOutcome
    from retrain.cli.render.live import RecordsFollower

JUST_STARTED = "--just-started"  # tells `resume` that it is the rest of `run --detach`
STOPPING = "the runs save a checkpoint and stop; press Ctrl-C again to kill them"


def command(
    file: ConfigFile,
    overrides: Overrides = None,
    budget_usd: BudgetUsd = None,
    detach: Detach = False,
    as_json: AsJson = False,
) -> None:
    """Run every condition with every seed and show the result.

    Ctrl-C lets the runs save a checkpoint and stop; a second Ctrl-C kills them.

    Example: retrain run campaign.toml --set campaign.max_workers=2
    """
    from retrain.campaign.run import start, with_budget
    from retrain.records.text import as_typed

    settings = with_budget(overrides or (), budget_usd)
    if detach:
        leave_running(start(file, settings).directory, [JUST_STARTED], as_json=as_json)
        return
    with ExitStack() as stack:
        observer = observe(stack)
        campaign = start(file, settings, observer)
        try:
            outcome = carry_out(campaign, observer)
        except LaunchError as error:  # the cluster may have accepted runs, and a second campaign repeats them
            directory = as_typed(campaign.directory)
            raise LaunchError(f"{error}\ncontinue with: retrain resume {directory}") from error
    finish(outcome, as_json=as_json)


@dataclass(frozen=True)
class Detached:
    """A campaign that runs in the background."""

    directory: str
    pid: int


def leave_running(directory: Path, arguments: Sequence[str] = (), *, as_json: bool) -> None:
    """Start an orchestrator in the background and print how to follow it."""
    from retrain.campaign.run import detach
    from retrain.records.text import as_typed

    pid, typed = detach(directory, arguments), as_typed(directory)
    if as_json:
        from retrain.cli.render.tables import print_result

        print_result(Detached(str(directory), pid))
        return
    typer.echo(f"{directory} runs in the background as process {pid}")
    typer.echo(f"follow: retrain logs {typed} -f")
    typer.echo(f"status: retrain status {typed}")
    typer.echo(f"wait: retrain wait {typed}")
    typer.echo(f"stop: retrain stop {typed}")


@contextmanager
def interruptible(stop: Callable[[bool], None], say: Callable[[str], None], *what: str) -> Iterator[None]:
    """Call `stop(now)` on Ctrl-C and SIGTERM, with `now` from the second one on, and say what happens."""
    presses = 0

    def on_interrupt(number: int, frame: object) -> None:
        nonlocal presses
        del number, frame
        presses += 1
        say(what[min(presses, len(what)) - 1])
        stop(presses > 1)

    before = {number: signal.signal(number, on_interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say_at_once(text: str) -> None:
    """Write a line from a signal handler, which must not wait for a lock."""
    with suppress(OSError):
        os.write(sys.stderr.fileno(), f"\n{text}\n".encode())


def carry_out(campaign: Campaign, shown: RecordsFollower, *, retry_failed: bool = False) -> CampaignOutcome:
    """Execute; the first Ctrl-C stops gracefully, the second kills."""
    with interruptible(lambda now: campaign.stop(now=now), shown.notice_soon, STOPPING, "killing the runs"):
        return campaign.execute(retry_failed=retry_failed)


def finish(outcome: CampaignOutcome, *, as_json: bool) -> None:
    """Print the result table and exit with the campaign's exit code."""
    from retrain.cli.render.status import resume_lines, show
    from retrain.cli.render.tables import console, messages, print_result, reader_may_leave
    from retrain.results.status import survey

    result = survey(outcome.directory, outcome.manifest)
    with reader_may_leave():
        if as_json:
            print_result(result, "campaigns")
        else:
            show(result[0], console())
    for line in resume_lines(result[0]):
        messages().print(line, soft_wrap=True)
    raise typer.Exit(outcome.exit_code)


def observe(stack: ExitStack) -> RecordsFollower:
    """Return a live view on a terminal, lines elsewhere."""
    from retrain.cli.render.live import LiveView, StepLines
    from retrain.cli.render.tables import messages

    errors = messages()
    return stack.enter_context(LiveView(errors) if sys.stderr.isatty() else StepLines(errors))
