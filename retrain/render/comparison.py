"""A comparison on the terminal: numbers, then the verdicts that they support."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from retrain.render.tables import BAD, fitted, table, width_of
from retrain.report.compare import Comparison, MetricComparison, Verdict
from retrain.report.tables import footnotes, grounds, heading, left_out, results

STYLES = {Verdict.NOT_ENOUGH: "yellow", Verdict.OTHER_STEPS: "yellow", Verdict.IDENTICAL: "dim"}


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
    columns, rows = results(metric)
    failed = columns.index(">failed")
    styled: list[list[str | Text]] = [list(row[:-1]) for row in rows]  # verdicts follow
    for row in styled:
        row[failed] = Text(str(row[failed]), style=BAD if row[failed] != "0" else "")
    console.print(fitted("", ["", *columns[1:-1]], styled, console.width))
    for line in left_out(metric.sides):
        console.print(f"  {line}", soft_wrap=True)
    for ground in grounds(metric):
        verdict = Text(ground.judgement, style=STYLES.get(ground.verdict, "bold"))
        against = f"  {ground.names} against {metric.sides[0].label}: "
        console.print(Text.assemble(against, verdict, f" ({ground.because})"), soft_wrap=True)
    console.print()


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
