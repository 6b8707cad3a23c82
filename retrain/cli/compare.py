"""`retrain compare`: which condition is better, and whether there are enough seeds to tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from retrain.base.errors import ConfigError
from retrain.cli import MOST_CONDITIONS, AsJson, Over, Per
from retrain.cli.render.tables import BAD, console, fitted, left_out, print_result, table, width_of
from retrain.records.decision import lines_of
from retrain.records.rungs import lines_of_search
from retrain.records.text import count_of
from retrain.records.windows import LAST, STEPS, Window, read_window

if TYPE_CHECKING:
    from retrain.results.report.compare import Comparison, MetricComparison

OPEN = ("not enough seeds to tell", "not comparable", "no difference found", "not decided", "still compared")
FOUND = ("higher", "lower")
STYLES = {**dict.fromkeys(OPEN, "yellow"), "identical": "dim"}  # else bold


def command(
    what: list[str] = Argument(
        metavar="DIR [NAME]",
        help="A campaign's or run's directory; after it, conditions or runs of that campaign.",
        show_default=False,
    ),
    metrics: list[str] | None = Option(
        None, "--metric", "-m", metavar="NAME", help="Metric to compare; repeatable."
    ),
    step: int | None = Option(
        None, "--step", min=1, metavar="N", help="Compare as if every run had ended after this step."
    ),
    last: int = Option(
        0,
        "--last",
        min=0,
        metavar="N",
        help="Average over the last N steps; 0: the last tenth, at least ten.",
    ),
    over: Over = "",
    per: Per = STEPS,
    unpaired: bool = Option(False, "--unpaired", help="Do not pair runs of the same seed."),
    as_json: AsJson = False,
) -> None:
    """Compare conditions, campaigns or runs over their seeds, with intervals and tests.

    One campaign: each condition against the first. Two campaigns: the conditions that both have.

    Examples: retrain compare logs/study; retrain compare logs/study grpo maxrl;
    retrain compare logs/monday grpo logs/tuesday grpo
    """
    from retrain.results.report.compare import compare, needed_metrics
    from retrain.results.report.sides import check_metrics, choose, known_metrics

    window = read_window(per, over or LAST) if over or per != STEPS else None
    if step or last:
        if window not in (None, Window()):
            raise ConfigError("--step and --last count steps back from an end: leave out --over and --per")
        window = Window(end=step, last=last)
    matches = choose(what, needed_metrics(metrics or ()))
    runs = {run.directory: run for match in matches for side in match.sides for run in side.runs}.values()
    unread = matches[0].unread
    for line in unread:
        typer.echo(line, err=True)
    if not set(known_metrics(runs)).issuperset(metrics or ()):  # the error names all that there are
        every = chain.from_iterable(side.runs for match in choose(what) for side in match.sides)
        check_metrics(metrics or [], known_metrics(every))
    comparisons = [compare(match, metrics or (), window, paired=not unpaired) for match in matches]
    if as_json:
        print_result(comparisons, "comparisons", left_out=unread)
    else:
        _show(comparisons)


def _show(comparisons: Sequence[Comparison]) -> None:
    from retrain.results.report.tables import footnotes

    out = console()
    for part in chain(*(_comparison(comparison, out.width) for comparison in comparisons)):
        out.print(part, soft_wrap=not isinstance(part, Table))
    for line in footnotes(comparisons):
        out.print(line, style="dim", soft_wrap=True)


def _comparison(comparison: Comparison, width: int) -> Iterator[str | Text | Table]:
    from retrain.results.report.compare import cost_lines

    if comparison.title:
        yield Text(comparison.title, style="bold underline")
    yield from _part("search", lines_of_search(comparison.searched))
    yield from _part("decision", lines_of(comparison.decision))
    yield from _part("without a score", map(str, comparison.unscored))
    for metric in comparison.metrics:
        yield from _metric(metric, width)
    yield from _part("cost of a run", cost_lines(comparison))
    if comparison.metrics:
        yield from _config(comparison, width)
    else:
        yield "no run has metrics yet: nothing to compare"


def _part(title: str, lines: Iterable[str]) -> Iterator[str | Text]:
    if shown := [f"  {line}" for line in lines]:
        yield Text(title, style="bold")
        yield from [*shown[:MOST_CONDITIONS], *left_out(len(shown), "line"), ""]


def _metric(metric: MetricComparison, width: int) -> Iterator[str | Text | Table]:
    """Iterate over the numbers of a metric, then the outcomes that they support."""
    from retrain.results.report.tables import excluded, grounds, heading, partly_paired, results, start_of

    yield Text.assemble((metric.metric, "bold"), (f"  {heading(metric)}", "dim"))
    columns, rows = results(metric)
    failed = columns.index(">failed")
    outcomes = [FOUND[0], *(judged.outcome for judged in metric.differences)]
    # differences that were found come first where not all are shown
    ranked = sorted(zip(outcomes, rows, strict=True), key=lambda pair: pair[0] not in FOUND)
    shown = [row for _, row in ranked[:MOST_CONDITIONS]] if len(rows) > MOST_CONDITIONS else rows
    styled: list[list[str | Text]] = [list(row[:-1]) for row in shown]  # outcomes follow
    for row in styled:
        row[failed] = Text(str(row[failed]), style=BAD if row[failed] != "0" else "")
    yield fitted("", ["", *columns[1:-1]], styled, width)
    yield from left_out(len(rows))
    remarks = chain(start_of(metric), excluded(metric), islice(partly_paired(metric), MOST_CONDITIONS))
    yield from (f"  {line}" for line in remarks)
    reasons = grounds(metric)
    if len(reasons) > MOST_CONDITIONS:
        reasons.sort(key=lambda ground: ground.outcome not in FOUND)
    for ground in reasons[:MOST_CONDITIONS]:
        outcome = Text(ground.judgement, style=STYLES.get(ground.outcome, "bold"))
        against = f"  {ground.names} against {metric.sides[0].label}: "
        yield Text.assemble(against, outcome, f" ({ground.because})")
    yield from left_out(len(reasons), "outcome")
    yield from (f"  {line}" for line in islice(metric.by_question(), MOST_CONDITIONS))
    yield ""


def _config(comparison: Comparison, width: int) -> Iterator[str | Text | Table]:
    """Iterate over the keys that differ: a table if it fits, else a line each."""
    labels = [side.label for side in comparison.metrics[0].sides]
    rows = [(row.key, *row.values) for row in comparison.config]
    columns = ["key", *labels]
    if not rows:
        yield "configuration: identical except for seeds"
    elif width_of(columns, rows) <= width:
        yield table("configuration", columns, rows, wrap=False)
    else:
        yield Text("configuration", style="bold")
        for key, *values in rows:
            pairs = [f"{label} {value}" for label, value in zip(labels, values, strict=True)]
            more = len(pairs) - MOST_CONDITIONS
            rest = f"; and {count_of(more, 'more condition')}: see --json" if more > 0 else ""
            yield f"  {key}: {'; '.join(pairs[:MOST_CONDITIONS])}{rest}"
