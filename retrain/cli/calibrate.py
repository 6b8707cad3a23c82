"""`retrain calibrate`: measure short real runs and recommend settings."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli import AsJson, ConfigFile, Overrides, duration
from retrain.cli.run import interruptible

if TYPE_CHECKING:
    from retrain.calibrate.conclude import Calibration


ENDING_TRIAL = "ending the trial; reporting what was measured"


def command(
    file: ConfigFile,
    overrides: Overrides = None,
    budget: Annotated[
        str, typer.Option("--budget", metavar="TIME", help="Time limit of all trials, such as 30m or 2h.")
    ] = "30m",
    steps: Annotated[int, typer.Option(min=4, max=1000, help="Steps of each pilot run.")] = 30,
    seeds: Annotated[int, typer.Option(min=1, max=16, help="Seeds of each condition in the pilot.")] = 1,
    most_workers: Annotated[
        int, typer.Option(min=1, max=1024, help="Largest number of concurrent workers to try.")
    ] = 16,
    probe_seconds: Annotated[
        float, typer.Option(min=0.0, help="Minimum time for each number of workers, in seconds.")
    ] = 4.0,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="The calibrated file; default: FILE.calibrated.toml."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a pilot and write a file with the recommended settings.

    Use it before a large campaign: it runs every condition for a few steps, then several workers
    concurrently, and searches for the best batch size. Your file is never changed. Ctrl-C ends it and reports
    what was measured so far.

    Example: retrain calibrate campaign.toml --budget 20m
    """
    from retrain.calibrate import Calibrator, check_target
    from retrain.calibrate.trials import Effort
    from retrain.render.calibration import show_trials
    from retrain.render.live import EventLines
    from retrain.render.tables import messages

    budget_s = duration(budget, "--budget")
    target = output or file.with_name(f"{file.stem}.calibrated.toml")
    calibrator = Calibrator(
        file,
        overrides or (),
        Effort(seeds=seeds, steps=steps, most_workers=most_workers, probe_s=probe_seconds),
    )
    check_target(target, file)
    errors = messages()
    show_trials(calibrator.trials(Path(calibrator.plan.log_dir)), budget_s, errors)
    with ExitStack() as stack:
        found = calibrator.run(
            budget_s,
            lambda: EventLines(errors),
            lambda trial: errors.print(f"{trial.name}: {trial.what}"),
            lambda session: stack.enter_context(
                interruptible(lambda now: session.interrupt(now=now), ENDING_TRIAL, ENDING_TRIAL)
            ),
        )
        if found.steps:  # otherwise nothing was measured, and an earlier file may hold more
            found = calibrator.write(found, target)
    _finish(found, as_json=as_json)


def _finish(found: Calibration, *, as_json: bool) -> None:
    """Print what was measured and exit with the code of its ending."""
    from retrain.errors import EXIT_INTERRUPTED, EXIT_RUN_FAILED
    from retrain.render.calibration import show
    from retrain.render.tables import console, print_json

    if as_json:
        print_json(found)
    else:
        show(found, console())
    if found.was_interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not found.steps:
        raise typer.Exit(EXIT_RUN_FAILED)
