"""A worker that ends while PyTorch still samples in another thread, which Python cannot interrupt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.test_trainer import SMALL, make_run


def test_a_run_that_fails_beside_sampling_ends_with_its_exit_code(tmp_path: Path) -> None:
    """It takes longer than five seconds, for which a worker waits for its threads."""
    ahead = {"backend": {"backend": "tests.stuck_sampling.connect_beside_torch"}}
    signal = {"data": {"task": "copy"}, "reward": {"reward": "partial"}, "rate_limiter": {"max_staleness": 4}}
    files = make_run(tmp_path / "r", {**SMALL, **ahead, **signal})
    command = [sys.executable, "-m", "retrain.worker", str(files.directory)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (4, "the update failed\n")
