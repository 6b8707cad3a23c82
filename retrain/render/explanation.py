"""`retrain explain` on the terminal."""

from __future__ import annotations

from rich.console import Console

from retrain.plan.explain import Explanation
from retrain.render.tables import table
from retrain.render.text import duration


def show(explanation: Explanation, console: Console) -> None:
    """Print the run matrix, the capacity and the warnings."""
    console.print(_matrix(explanation))
    for condition in explanation.conditions:
        for difference in condition.differs:
            console.print(f"  {condition.condition}: {difference}")
    console.print()
    for name, value in _facts(explanation):
        console.print(f"{name:<24}{value}", soft_wrap=True)
    for warning in explanation.warnings:
        console.print(f"\nnote: {warning}", style="yellow")


def _matrix(explanation: Explanation) -> object:
    rows = [
        (
            c.condition,
            " ".join(map(str, c.seeds)),
            str(c.max_steps),
            f"{c.batch_size} x {c.group_size} = {c.concurrency}",
            str(c.max_tokens),
            c.backend,
            c.task,
        )
        for c in explanation.conditions
    ]
    columns = ("condition", "seeds", ">steps", ">concurrency per step", ">max_tokens", "backend", "task")
    return table(f"{explanation.name}: {explanation.total_runs} runs", columns, rows)


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
