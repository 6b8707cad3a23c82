"""`retrain explain`: what a file would do, and how long it would take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from retrain.cli.options import AsJson, ConfigFile, Overrides

if TYPE_CHECKING:
    from retrain.plan.matrix import Plan


def command(
    file: ConfigFile,
    overrides: Overrides = None,
    logs: Annotated[
        Path | None, typer.Option("--from", metavar="LOGS", help="Take step times from earlier runs.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a file would do and how long it would take, and check it; nothing is created.

    Example: retrain explain campaign.toml --from logs
    """
    from retrain.config.load import load_config
    from retrain.plan.explain import explain_plan
    from retrain.plan.matrix import plan_runs
    from retrain.plan.preflight import preflight
    from retrain.render.explanation import show
    from retrain.render.tables import console, print_json
    from retrain.system import cpu_capacity

    plan = plan_runs(load_config(file, overrides or ()), file.name)
    facts = preflight(plan, file.name)
    explanation = explain_plan(plan, facts, _step_times(plan, logs), cpu_capacity(), str(file))
    if as_json:
        print_json(explanation)
    else:
        show(explanation, console())


def _step_times(plan: Plan, logs: Path | None) -> dict[str, list[float]]:
    """Median step times of earlier runs by condition: the same conditions if there are any, else all."""
    if logs is None:
        return {}
    from retrain.status.survey import survey

    found: dict[str, list[float]] = {}
    for campaign in survey(logs):
        for run in campaign.runs:
            if run.step_time_s is not None:
                found.setdefault(run.condition, []).append(run.step_time_s)
    return {label: times for label, times in found.items() if label in plan.conditions} or found
