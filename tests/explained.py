"""A small plan of two conditions, and what `explain` says of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from retrain.config.load import parse
from retrain.plan.build import plan_runs
from retrain.plan.estimate.history import History
from retrain.plan.explain import ChecklistLine, Explanation, explain_plan
from retrain.plan.matrix import Plan
from retrain.plan.preflight import preflight

SMOKE = {"batch_size": 2, "group_size": 8, "max_tokens": 16}


def plan_of(
    logs: Path,
    *,
    steps: int = 40,
    training: dict[str, Any] | None = None,
    evals: Sequence[dict[str, Any]] = (),
    data: dict[str, Any] | None = None,
    **campaign: Any,
) -> Plan:
    raw = {
        "eval": list(evals),
        "training": training or SMOKE,
        "data": data or {},
        "logging": {"log_dir": str(logs)},
        "campaign": {
            "seeds": [0, 1],
            "max_steps": steps,
            "conditions": [{"name": "a"}, {"name": "b", "advantage_mode": "grpo"}],
            **campaign,
        },
    }
    return plan_runs(parse(raw, "c.toml"), "c.toml")


def explained(plan: Plan, history: History | None, **options: Any) -> Explanation:
    return explain_plan(plan, preflight(plan, "c.toml"), history, 2.0, "c.toml", **options)


def line_of(explanation: Explanation, question: str) -> ChecklistLine:
    return next(line for line in explanation.checklist if line.question == question)
