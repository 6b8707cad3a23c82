"""A campaign of equal runs of one model, so many at a time, with what it took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from retrain.control.machine import descendants, own_memory_bytes, read_processes
from retrain.records.metrics import read_metrics

ROOT = Path(__file__).parent.parent
POLL_S = 0.25
REWARD = '''
def even(completion, prompt):
    """Return the share of words with even numbers."""
    words = completion.split()
    return sum(word[-1:] in ("0", "2", "4", "6", "8") for word in words) / max(1, len(words))
'''
TOML = """
[model]
model = {model}
lora_rank = 16
[training]
batch_size = {prompts}
group_size = {group}
max_tokens = {tokens}
temperature = 1.0
lr = 1e-4
save_every = 0
[data]
task = "jsonl"
[data.options]
path = "prompts.jsonl"
answer_field = ""
held_out = 0.0
[reward]
reward = "even_words.even"
[backend]
backend = "local"
options = {{ device = {device}, local_files_only = true }}
[campaign]
name = "runs"
seeds = {seeds}
max_steps = {steps}
parallel = true
max_workers = {workers}
retries = 0
"""


@dataclass(frozen=True)
class Campaign:
    """What a campaign took."""

    wall_s: float  # with the start of every process
    steps_s: (
        float  # from the begin of the first step to the end of the last, of runs one after another their sum
    )
    tokens: int  # sampled
    memory_mb: float  # at its peak, of all processes together
    rewards: Mapping[str, Sequence[float]]  # each run's, step after step


def measured_campaign(
    directory: Path, model: str, device: str, prompts: Sequence[str], sizes: Mapping[str, int]
) -> Campaign:
    """Run a campaign to its end; `sizes` are group, tokens, steps, runs and workers."""
    directory.mkdir()
    (directory / "even_words.py").write_text(REWARD)
    (directory / "prompts.jsonl").write_text("".join(f"{json.dumps({'prompt': one})}\n" for one in prompts))
    text = TOML.format(
        **sizes,
        prompts=len(prompts),
        model=json.dumps(model),
        device=json.dumps(device),
        seeds=list(range(sizes["runs"])),
    )
    (directory / "runs.toml").write_text(text)
    threads = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    began_s, peak = time.monotonic(), 0.0
    with (directory / "output.txt").open("wb") as output:
        running = subprocess.Popen(
            [sys.executable, "-m", "retrain", "run", "runs.toml"],
            cwd=directory,
            env={**os.environ, **threads, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            stdout=output,
            stderr=output,
        )
        while running.poll() is None:
            peak = max(peak, memory_bytes(running.pid, device))
            time.sleep(POLL_S)
    wall_s = time.monotonic() - began_s
    if running.returncode:
        sys.exit((directory / "output.txt").read_text()[-2000:])
    rows = {path.name: read_metrics(path) for path in sorted(directory.glob("logs/*/runs/*"))}
    everything = [row for one in rows.values() for row in one]
    return Campaign(
        wall_s=wall_s,
        steps_s=time_in_steps(list(rows.values()), sizes["workers"]),
        tokens=sum(row["tokens_per_step"] for row in everything),
        memory_mb=peak / 1e6,
        rewards={name: [row["mean_reward"] for row in one] for name, one in rows.items()},
    )


def time_in_steps(runs: Sequence[Sequence[Mapping[str, Any]]], workers: int) -> float:
    if workers == 1:
        return float(sum(row["step_time_s"] for rows in runs for row in rows))
    ends = [ended_s(row) for rows in runs for row in rows]
    return max(ends) - min(ended_s(rows[0]) - float(rows[0]["step_time_s"]) for rows in runs)


def ended_s(row: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(row["timestamp"]).timestamp()


def memory_bytes(pid: int, device: str) -> float:
    """Return what the campaign's processes take on the CPU, or what all processes take of the GPU."""
    if device == "cpu":
        return own_memory_bytes(descendants([pid], read_processes()))
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free)
