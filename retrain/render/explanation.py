"""`retrain explain` on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from retrain.plan.durations import about, format_duration
from retrain.plan.explain import Explanation
from retrain.records.text import count_of, plain
from retrain.render.tables import fitted

if TYPE_CHECKING:
    from retrain.plan.estimate.wall_time import WallTime

MOST_SEEDS = 8  # more are abbreviated
CHECK_STYLES = {"pass": "green", "warn": "yellow", "unknown": "cyan"}
UNRELIABLE = {"short": " (a short pilot: see below)", "heavy": " (unreliable: see below)"}


def show(explanation: Explanation, console: Console) -> None:
    """Print the run matrix, the capacity, the warnings and the checklist."""
    console.print(_matrix(explanation, console.width))
    for condition in explanation.conditions:
        for difference in condition.differs:
            console.print(f"  {condition.condition}: {plain(difference, 200)}", soft_wrap=True)
    console.print()
    for name, value in _facts(explanation):
        console.print(f"{name:<24}{plain(value, 500)}", soft_wrap=True)
    for note in explanation.wall_time.notes if explanation.wall_time else ():
        console.print(f"  {plain(note, 500)}", soft_wrap=True)
    if explanation.script:
        console.print(f"\nscript for {explanation.launcher}:\n", soft_wrap=True)
        for said in explanation.script.splitlines():
            indent = " " * (4 + len(said) - len(said.lstrip()))
            console.print(indent + plain(said, 2000), soft_wrap=True, markup=False, highlight=False)
    for warning in explanation.warnings:
        console.print(f"\nnote: {plain(warning, 500)}", style="yellow", soft_wrap=True)
    console.print("\nbefore a full run", style="bold")
    for line in _checklist(explanation):
        console.print(line, soft_wrap=True)


def _matrix(explanation: Explanation, width: int) -> object:
    rows = [
        (
            c.condition,
            _seeds(c.seeds),
            str(c.max_steps),
            f"{c.batch_size} x {c.group_size} = {c.concurrency}",
            str(c.max_tokens),
            c.backend,
            c.task,
        )
        for c in explanation.conditions
    ]
    columns = ("condition", "seeds", ">steps", ">concurrency a step", ">max_tokens", "backend", "task")
    return fitted(f"{explanation.name}: {count_of(explanation.total_runs, 'run')}", columns, rows, width)


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) <= MOST_SEEDS:
        return " ".join(map(str, seeds))
    return f"{seeds[0]} {seeds[1]} ... {seeds[-1]} ({len(seeds)})"


def _facts(explanation: Explanation) -> list[tuple[str, str]]:
    facts = [
        ("total campaign steps", str(explanation.total_campaign_steps)),
        ("effective parallelism", f"{explanation.effective_parallelism} ({explanation.launcher})"),
        (
            "permits (API calls)",
            f"{explanation.permits} at first, then adapted to the API"
            if explanation.permits_adapt
            else str(explanation.permits),
        ),
        ("log directory", f"{explanation.log_dir}/"),
    ]
    if explanation.sandboxes:
        facts.append(("programs run in", ", ".join(explanation.sandboxes)))
    return [
        *facts,
        *(_unknown(explanation) if explanation.wall_time is None else _time(explanation.wall_time)),
    ]


def _unknown(explanation: Explanation) -> list[tuple[str, str]]:
    return [
        ("wall time", "unknown; no earlier run has measured " + ", ".join(explanation.unknown)),
        ("measure it with", explanation.pilot_command),
    ]


def _time(time: WallTime) -> list[tuple[str, str]]:
    steps = f"of {time.measured_runs} earlier runs, {time.measured_steps} steps"
    facts = [("median step time", f"{format_duration(time.median_step_time_s)} ({steps})")]
    beside = [
        (what, s) for what, s in (("start-up", time.startup_s), ("end", time.closing_s)) if s is not None
    ]
    if beside:
        facts.append(
            ("outside the steps", ", ".join(f"{what} {format_duration(s)}" for what, s in beside) + " a run")
        )
    waits = f", {time.permit_wait_fraction:.0%} of a step waiting" if time.permit_wait_fraction > 0.01 else ""
    facts += [
        ("wall time, lower bound", f"{about(time.rule_of_thumb_s)} (total work over parallelism)"),
        (
            "wall time, forecast",
            f"P50 {about(time.p50_s)}, P90 {about(time.p90_s)}{UNRELIABLE.get(time.tail, '')}",
        ),
        ("limited by", f"{time.limited_by} ({time.waves} wave{'s' * (time.waves != 1)}{waits})"),
    ]
    for number, change in enumerate(time.changes):
        facts.append(("what would shorten it" if number == 0 else "", f"{change.text} [{change.setting}]"))
    if time.actual_over_p50:
        ratios = sorted({f"{ratio:.2f}" for ratio in time.actual_over_p50})
        took = " to ".join([ratios[0], ratios[-1]][: len(ratios)])
        facts.append(("earlier forecasts", f"{len(time.actual_over_p50)}; actual time was {took} of P50"))
    return facts


def _checklist(explanation: Explanation) -> Iterator[Text]:
    for check in explanation.checklist:
        line = Text(f"{check.state:<8}", style=CHECK_STYLES[check.state])
        line.append(f"{check.question}: {plain(check.answer, 500)}", style="default")
        yield line
        if check.command:
            yield Text(f"        {plain(check.command, 500)}", style="dim")
