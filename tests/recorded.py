"""Runs as their records would be after so many seconds: real files, chosen times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import tomli_w

from retrain.config.resolve import as_tables
from retrain.plan.matrix import Plan, RunPlan
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.manifest import Expectation, new_manifest, write_manifest
from retrain.records.run_row import RunEntry
from retrain.records.run_state import write_done

EPOCH = datetime(2025, 1, 31, 12, tzinfo=UTC)


def at(seconds: float) -> str:
    """Return a timestamp so many seconds after the beginning of the world."""
    return (EPOCH + timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def record_run(
    files: RunFiles,
    run: RunPlan,
    step_times_s: Sequence[float],
    *,
    began_s: float = 0.0,
    startup_s: float = 0.0,
    between_s: float = 0.0,
    closing_s: float | None = None,
    ending: str | None = None,
    **fields: Any,
) -> float:
    """Write a run of one attempt; with `closing_s` it is done. Gives the time at which it ended."""
    files.directory.mkdir(parents=True, exist_ok=True)
    files.run_toml.write_text(tomli_w.dumps(as_tables(run.config)))
    now, rows = began_s + startup_s, []
    for step, step_time_s in enumerate(step_times_s, 1):
        now += step_time_s + (between_s if step > 1 else 0.0)
        row = {
            "step": step,
            "attempt": 1,
            "timestamp": at(now),
            "step_time_s": step_time_s,
            "mean_reward": 0.5,
        }
        rows.append(row | fields)
    files.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    events = [{"event": "begin", "attempt": 1, "started_at": at(began_s)}]
    if closing_s is not None or ending:
        now += closing_s or 0.0
        events.append({"event": "end", "attempt": 1, "ended_at": at(now), "ending": ending or "done"})
    files.attempts.write_text("".join(json.dumps(event) + "\n" for event in events))
    if closing_s is not None:
        write_done(files.done, run.config_hash, {"eval_reward": 0.5})
    return now


def record_campaign(
    plan: Plan, name: str, expected: Expectation | None = None, **record: Any
) -> CampaignFiles:
    """Write a campaign of `plan` below its log directory: each run as `record_run` would."""
    files = CampaignFiles(Path(plan.log_dir) / name)
    step_times_s = record.pop("step_times_s", {})
    for run in plan.runs:
        record_run(
            files.run(run.run_id), run, step_times_s.get(run.condition, [1.0] * run.max_steps), **record
        )
    files.campaign_toml.touch()
    planned = [RunEntry(r.run_id, r.condition, r.seed, r.max_steps, r.config_hash) for r in plan.runs]
    manifest = new_manifest(plan.name, plan.config_hash, planned, Path.cwd())
    write_manifest(files.manifest, replace(manifest, expected=expected, workers=plan.workers))
    return files
