"""`retrain compare`: which condition is better, and whether there are enough seeds to tell."""

from __future__ import annotations

from typing import Annotated

import typer

from retrain.cli import AsJson


def command(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR [NAME]",
            help="A campaign's or run's directory; after it, conditions or runs of that campaign.",
            show_default=False,
        ),
    ],
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metric", "-m", metavar="NAME", help="Metric to compare; repeatable."),
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=1, help="Compare as if every run had ended after this step.")
    ] = None,
    last: Annotated[
        int, typer.Option("--last", min=0, help="Average over the last N steps; 0: the last tenth.")
    ] = 0,
    unpaired: Annotated[bool, typer.Option("--unpaired", help="Do not pair runs of the same seed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare conditions, campaigns or runs over their seeds, with intervals and a verdict.

    One campaign: each condition against the first. Two campaigns: the conditions that both have.

    Examples: retrain compare logs/study; retrain compare logs/study grpo maxrl;
    retrain compare logs/monday grpo logs/tuesday grpo
    """
    from retrain.render.comparison import show
    from retrain.render.tables import console, print_result
    from retrain.report.compare import compare
    from retrain.report.gather import left_out
    from retrain.report.sides import Moment, check_metrics, choose, known_metrics

    matches = choose(what)
    runs = {run.directory: run for match in matches for side in match.sides for run in side.runs}.values()
    for line in left_out(runs):
        typer.echo(line, err=True)
    known = known_metrics(runs)
    check_metrics(metrics or [], known)
    moment = Moment(step=step, last=last)
    found = [compare(match, metrics or (), moment, paired=not unpaired) for match in matches]
    if as_json:
        print_result(found, "comparisons")
    else:
        show(found, console())
