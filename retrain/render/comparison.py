"""A comparison on the terminal: numbers, then the verdicts that they support."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from retrain.render.tables import BAD, fitted, table, width_of
from retrain.report.compare import Comparison, Judged, MetricComparison, SideResult, Verdict
from retrain.report.numbers import interval, significant
from retrain.report.wording import footnotes, grounds, heading, left_out

STYLES = {Verdict.NOT_ENOUGH: "yellow", Verdict.OTHER_STEPS: "yellow", Verdict.IDENTICAL: "dim"}
COLUMNS = ("", ">mean", ">difference", "95 % interval", ">runs", ">failed")
MORE_COLUMNS = (">IQM", ">P(higher)", "bootstrap interval")


def show(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print comparisons one after another."""
    for comparison in comparisons:
        if comparison.title:
            console.print(Text(comparison.title, style="bold underline"))
        for metric in comparison.metrics:
            _show_metric(metric, console)
        if not comparison.metrics:
            console.print("no run has metrics yet: nothing to compare", soft_wrap=True)
        _show_config(comparison, console)
    for line in footnotes(comparisons):
        console.print(line, style="dim", soft_wrap=True)


def _show_metric(metric: MetricComparison, console: Console) -> None:
    name = Text.assemble((metric.metric, "bold"), (f"  {heading(metric)}", "dim"))
    console.print(name, soft_wrap=True)
    base, *others = metric.sides
    rows = [_row(base, None), *map(_row, others, metric.differences)]
    console.print(fitted("", [*COLUMNS, *MORE_COLUMNS], rows, console.width))
    for line in left_out(metric.sides):
        console.print(f"  {line}", soft_wrap=True)
    for ground in grounds(metric):
        verdict = Text(ground.judgement, style=STYLES.get(ground.verdict, "bold"))
        against = f"  {ground.names} against {base.label}: "
        console.print(Text.assemble(against, verdict, f" ({ground.because})"), soft_wrap=True)
    console.print()


def _row(side: SideResult, judged: Judged | None) -> tuple[str | Text, ...]:
    gap = judged.difference if judged else None
    counted = f"{side.sample.n} of {side.runs}" if side.sample.n < side.runs else str(side.sample.n)
    return (
        side.label,
        significant(side.sample.mean),
        significant(gap.difference, signed=True) if gap else "",
        interval(gap.low, gap.high) if gap else "",
        counted,
        Text(str(side.failed), style=BAD) if side.failed else "0",
        significant(side.sample.iqm),
        significant(gap.improvement) if gap else "",
        interval(gap.bootstrap_low, gap.bootstrap_high) if gap else "",
    )


def _show_config(comparison: Comparison, console: Console) -> None:
    if not comparison.metrics:
        return
    if not comparison.config:
        console.print("configuration: identical except for seeds", soft_wrap=True)
        return
    labels = [side.label for side in comparison.metrics[0].sides]
    rows = [(row.key, *row.values) for row in comparison.config]
    columns = ["key", *labels]
    if width_of(columns, rows) <= console.width:
        console.print(table("configuration", columns, rows, wrap=False))
        return
    console.print(Text("configuration", style="bold"))
    for key, *values in rows:
        pairs = "; ".join(f"{label} {value}" for label, value in zip(labels, values, strict=True))
        console.print(f"  {key}: {pairs}", soft_wrap=True)
