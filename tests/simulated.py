"""Campaign directories as runs leave them, written by the real writers, without running anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from retrain.config.resolve import as_tables
from retrain.config.schema import AlgorithmSection, Config, RunSection, TrainingSection
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.manifest import new_manifest, refresh, write_manifest
from retrain.records.metrics import MetricsWriter
from retrain.records.run_row import RunEntry
from retrain.records.run_state import begin_attempt, end_attempt, write_done
from retrain.results.report.gather import gather
from retrain.results.report.sides import Side, conditions

Row = dict[str, Any]


@dataclass(frozen=True)
class Simulated:
    """How one run went."""

    rewards: Sequence[float]  # one per step
    ending: str = "done"  # an attempt's ending; "" for a process that died without a message
    held_out: float | None = None
    message: str = ""
    output: str = ""
    more: Callable[[int], Row] = field(default=lambda step: {})  # further fields of a step's row


def write_campaign(
    log_dir: Path, runs: Mapping[tuple[str, int], Simulated], *, steps: int = 20, name: str = "study-1a2b"
) -> Path:
    """Write a campaign of (condition, seed) -> how it went; gives its directory."""
    files = CampaignFiles(log_dir / name)
    files.directory.mkdir(parents=True)
    planned = [RunEntry(f"{c}_s{s}", c, s, steps) for c, s in runs]
    for run, how in zip(planned, runs.values(), strict=True):
        _write_run(files.run(run.run_id), run, how)
    files.campaign_toml.write_text('[campaign]\nname = "study"\n')
    manifest = new_manifest("study", "hash", planned, log_dir)
    write_manifest(files.manifest, refresh(manifest, files, ended=True))
    return files.directory


def side(tmp_path: Path, *runs: Simulated, steps: int = 20) -> Side:
    """One condition with these seeds."""
    directory = write_campaign(tmp_path, {("grpo", s): run for s, run in enumerate(runs)}, steps=steps)
    return conditions(gather(directory))[0]


def flat(reward: float, steps: int = 20, **how: Any) -> Simulated:
    """A run whose every step has the same reward."""
    return Simulated([reward] * steps, held_out=reward, **how)


def _write_run(files: RunFiles, run: RunEntry, how: Simulated) -> None:
    files.directory.mkdir(parents=True)
    config = Config(
        training=TrainingSection(seed=run.seed, max_steps=run.max_steps),
        algorithm=AlgorithmSection(advantage_mode=run.condition),
        run=RunSection(run.run_id, "study", run.condition),
    )
    files.run_toml.write_text(tomli_w.dumps(as_tables(config)))
    files.output_log.write_text(how.output)
    begin_attempt(files.attempts)
    with MetricsWriter(files.metrics, 1) as rows:
        for step, reward in enumerate(how.rewards, 1):
            rows.append(_row(step, reward) | how.more(step))
    if how.ending:
        end_attempt(files.attempts, 1, how.ending, message=how.message, duration_s=2.0 * len(how.rewards))
    if how.ending == "done":
        write_done(files.done, "", {} if how.held_out is None else {"eval_reward": how.held_out})


def _row(step: int, reward: float) -> Row:
    return {
        "step": step,
        "timestamp": f"2025-01-31T12:{step * 2 // 60 % 60:02d}:{step * 2 % 60:02d}.000Z",
        "mean_reward": reward,
        "step_time_s": 2.0,
        "sample_time_s": 1.0,
        "reward_time_s": 0.25,
        "train_time_s": 0.5,
        "permit_wait_s": 0.5,
    }
