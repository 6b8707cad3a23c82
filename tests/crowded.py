"""Campaigns whose runs share cores, simulated piece by piece, with the records that they would leave.

Every run alive gets an equal share of the cores, at most one; nothing here is the estimator's.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import tomli_w

from retrain.config.resolve import as_tables
from retrain.plan.matrix import Plan, RunPlan
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.manifest import new_manifest, write_manifest
from retrain.records.run_row import RunEntry
from retrain.records.run_state import RunState, write_done
from tests.recorded import at


@dataclass
class Worked:
    """One run: core-seconds of its pieces (launch, start-up, steps, closing), and when each ended."""

    pieces: list[float]
    ends_s: list[float] = field(default_factory=list)

    @property
    def began_s(self) -> float:
        """When its worker wrote its first record."""
        return self.ends_s[0]

    @property
    def is_over(self) -> bool:
        return len(self.ends_s) == len(self.pieces)


def simulate(
    plan: Plan,
    cores: float,
    *,
    seed: int = 0,
    launch_s: float = 0.5,
    startup_s: float = 2.0,
    closing_s: float = 0.5,
    cv: float = 0.1,
) -> dict[str, Worked]:
    """Run a plan to its end; steps take a core-second on average."""
    rng = random.Random(seed)
    waiting = []
    for run in plan.runs:
        steps = [rng.gauss(1, cv) for _ in range(run.max_steps)]
        waiting.append((run.run_id, Worked([launch_s, startup_s, *steps, closing_s])))
    runs, alive, now = dict(waiting), dict[str, float](), 0.0  # left of each one's present piece
    while waiting or alive:
        while waiting and len(alive) < plan.workers:
            name, run = waiting.pop(0)
            alive[name] = run.pieces[0]
        share = min(1.0, cores / len(alive))
        first = min(alive, key=lambda name: alive[name])
        done = alive[first]
        now += done / share
        alive = {name: left - done for name, left in alive.items()}
        run = runs[first]
        run.ends_s.append(now)
        if run.is_over:
            del alive[first]
        else:
            alive[first] = run.pieces[len(run.ends_s)]
    return runs


def end_s(runs: dict[str, Worked]) -> float:
    return max(run.ends_s[-1] for run in runs.values())


def record(plan: Plan, runs: dict[str, Worked], name: str, until_s: float, cores: float) -> CampaignFiles:
    """Write what would be on disk at some time."""
    files = CampaignFiles(Path(plan.log_dir) / name)
    planned = [RunEntry(r.run_id, r.condition, r.seed, r.max_steps, r.config_hash) for r in plan.runs]
    files.directory.mkdir(parents=True)
    files.campaign_toml.touch()
    entries = []
    for run, entry in zip(plan.runs, planned, strict=True):
        worked = runs[run.run_id]
        _record_run(files.run(run.run_id), run, worked, until_s)
        ended = at(worked.ends_s[-1]) if worked.ends_s[-1] <= until_s else ""
        state = RunState.DONE if ended else RunState.RUNNING
        begun = worked.began_s < until_s
        seen = {"state": state, "attempts": 1, "started_at": at(worked.began_s), "ended_at": ended}
        entries.append(replace(entry, **(seen if begun else {})))
    manifest = replace(
        new_manifest(plan.name, plan.config_hash, planned, Path.cwd()),
        started_at=at(0.0),
        runs=tuple(entries),
        workers=plan.workers,
        shared_cores=cores,
    )
    write_manifest(files.manifest, manifest)
    return files


def _record_run(files: RunFiles, run: RunPlan, worked: Worked, until_s: float) -> None:
    if worked.began_s >= until_s:
        return
    files.directory.mkdir(parents=True)
    files.run_toml.write_text(tomli_w.dumps(as_tables(run.config)))
    events = [{"event": "begin", "attempt": 1, "started_at": at(worked.began_s)}]
    rows = []
    for step in range(1, run.max_steps + 1):
        begin, end = worked.ends_s[step : step + 2]
        if end <= until_s:
            row = {"step": step, "attempt": 1, "timestamp": at(end), "step_time_s": end - begin}
            rows.append(row | {"mean_reward": 0.5})
    files.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if worked.ends_s[-1] <= until_s:
        events.append({"event": "end", "attempt": 1, "ended_at": at(worked.ends_s[-1]), "ending": "done"})
        write_done(files.done, run.config_hash, {"eval_reward": 0.5})
    files.attempts.write_text("".join(json.dumps(event) + "\n" for event in events))
