"""A process that ends while PyTorch still samples in another thread, which Python cannot interrupt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tomli_w

from tests.trainer.test_trainer import SMALL, make_run

AHEAD = {
    **SMALL,
    "backend": {"backend": "tests.stuck_sampling.connect_beside_torch"},
    "data": {"task": "copy"},
    "reward": {"reward": "partial"},
    "rate_limiter": {"max_staleness": 4},
}


def test_a_run_that_fails_beside_sampling_ends_with_its_exit_code(tmp_path: Path) -> None:
    """It takes longer than five seconds, for which a worker waits for its threads."""
    files = make_run(tmp_path / "r", AHEAD)
    command = [sys.executable, "-m", "retrain.trainer.worker", str(files.directory)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (4, "the update failed\n")


def test_so_does_the_command_that_runs_it_within_itself(tmp_path: Path) -> None:
    tables = {**AHEAD, "campaign": {"seeds": [0], "max_steps": 4, "launcher": "inline"}}
    (tmp_path / "c.toml").write_text(tomli_w.dumps(tables))
    command = [sys.executable, "-m", "retrain", "run", "c.toml"]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=here)
    assert ended.returncode == 4, ended.stderr
    assert "the update failed" in ended.stdout + ended.stderr
