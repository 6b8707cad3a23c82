"""`retrain explain`: what a file would run, how long it would take, and what to check first."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from retrain.cli import AsJson, ConfigFile, Overrides, duration


def command(
    file: ConfigFile,
    overrides: Overrides = None,
    logs: Annotated[
        Path | None,
        typer.Option("--from", metavar="LOGS", help="Take step and start-up times from earlier campaigns."),
    ] = None,
    budget: Annotated[
        str,
        typer.Option("--budget", metavar="TIME", help="Longest acceptable wall time, as 6h or 1h30m."),
    ] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Exit with code 2 if a line of the checklist warns.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a file, show its run matrix and forecast its wall time; nothing is created.

    Use it before every campaign: first for the pilot to run, then with --from for an estimate.

    Example: retrain explain campaign.toml --from logs --budget 6h
    """
    from retrain.campaign.admission import check_memory, free_memory
    from retrain.campaign.assign import as_launched, check_launch, has_engine, launch_script
    from retrain.config.load import load_config, sets_key
    from retrain.errors import EXIT_CONFIG
    from retrain.plan.explain import explain_plan
    from retrain.plan.matrix import plan_runs
    from retrain.plan.preflight import preflight
    from retrain.render.explanation import show
    from retrain.render.tables import console, print_result
    from retrain.system import cpu_capacity

    budget_s = duration(budget, "--budget") if budget else None
    plan = plan_runs(load_config(file, overrides or ()), file.name)
    check_launch(plan, file.name)
    checked = preflight(plan, file.name)
    if not has_engine(plan.campaign):
        check_memory(plan, file.name, checked.memory.values())
    plan = as_launched(plan)
    history = None
    if logs is not None:
        from retrain.plan.estimate.history import learn

        history = learn(logs, plan.conditions)
    explanation = explain_plan(
        plan,
        checked,
        history,
        cpu_capacity(),
        shlex.quote(str(file)),
        learned_from=shlex.quote(str(logs)) if logs else "",
        budget_s=budget_s,
        sets_max_tokens=sets_key(file, overrides or (), "training", "max_tokens"),
        script=launch_script(plan),
        free_memory=free_memory,
    )
    if as_json:
        print_result(explanation)
    else:
        show(explanation, console())
    if check and any(line.state == "warn" for line in explanation.checklist):
        raise typer.Exit(EXIT_CONFIG)
