"""A campaign of thousands of runs of a single step, and what `retrain status` costs on it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

TOML = """
[training]
batch_size = 1
group_size = 2
max_tokens = 4
[data]
task = "copy"
eval_prompts = 1
[logging]
log_dir = "{log_dir}"
[campaign]
name = "scale"
seeds = {seeds}
max_steps = 1
parallel = true
max_workers = {workers}
launcher = "{launcher}"
[campaign.{launcher}]
poll_seconds = 2
{keys}
"""


def campaign_of(runs: int, workers: int, launcher: str, log_dir: Path, keys: str = "") -> str:
    """Return the file of such a campaign; `keys` are more of the launcher's."""
    return TOML.format(
        seeds=list(range(runs)), workers=workers, launcher=launcher, log_dir=log_dir, keys=keys
    )


def status_cost(campaign: Path, environment: Mapping[str, str] | None = None) -> tuple[float, float]:
    """Return its seconds, and those of them on a processor: the rest is waiting for other work."""
    before, begin = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "retrain", "status", str(campaign)]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    after, wall_s = os.times(), time.perf_counter() - begin
    cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
    return wall_s, cpu_s
