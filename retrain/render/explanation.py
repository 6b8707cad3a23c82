"""`retrain explain` on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from retrain.plan.explain import Explanation
from retrain.records.text import plain
from retrain.render.tables import fitted
from retrain.render.text import duration

MOST_SEEDS = 8  # more are abbreviated


def show(explanation: Explanation, console: Console) -> None:
    """Print the run matrix, the capacity and the warnings."""
    console.print(_matrix(explanation, console.width))
    for condition in explanation.conditions:
        for difference in condition.differs:
            console.print(f"  {condition.condition}: {plain(difference, 200)}", soft_wrap=True)
    console.print()
    for name, value in _facts(explanation):
        console.print(f"{name:<24}{plain(value, 500)}", soft_wrap=True)
    for warning in explanation.warnings:
        console.print(f"\nnote: {plain(warning, 500)}", style="yellow", soft_wrap=True)


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
    return fitted(f"{explanation.name}: {explanation.total_runs} runs", columns, rows, width)


def _seeds(seeds: Sequence[int]) -> str:
    if len(seeds) <= MOST_SEEDS:
        return " ".join(map(str, seeds))
    return f"{seeds[0]} {seeds[1]} ... {seeds[-1]} ({len(seeds)})"


def _facts(explanation: Explanation) -> list[tuple[str, str]]:
    facts = [
        ("total campaign steps", str(explanation.total_campaign_steps)),
        ("effective parallelism", f"{explanation.effective_parallelism} ({explanation.launcher})"),
        ("permits (API calls)", str(explanation.permits)),
        ("records below", f"{explanation.log_dir}/"),
    ]
    time = explanation.wall_time
    if time is None:
        return [*facts, ("wall time", "unknown; run a pilot first:"), ("", explanation.pilot_command)]
    return [
        *facts,
        ("median step time", f"{duration(time.median_step_time_s)} (of {time.measured_runs} earlier runs)"),
        ("wall time, by thumb", duration(time.rule_of_thumb_s)),
        (
            "wall time, simulated",
            f"{duration(time.simulated_s)} in {time.waves} waves, limited by {time.limited_by}",
        ),
    ]
