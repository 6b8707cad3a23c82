"""A clock that is set back and forward by an hour in the middle of a campaign changes no decision."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts

ROOT = Path(__file__).parents[2]
Call = Callable[..., subprocess.CompletedProcess[str]]

# Imported by every Python process of the campaign before anything else.
JUMPING_CLOCK = """
import itertools, time
offsets = itertools.cycle([0, -3600, 3600])
real_ns, real_gmtime = time.time_ns, time.gmtime
time.time_ns = lambda: real_ns() + next(offsets) * 10**9
time.time = lambda: time.time_ns() / 1e9
time.gmtime = lambda seconds=None: real_gmtime(time.time() if seconds is None else seconds)
"""
KEYS = ("step", "loss", "mean_reward", "grad_norm", "lr")


def rows_of(here: Path) -> dict[str, list[list[object]]]:
    (campaign,) = (here / "logs").iterdir()
    return {
        run.name: [[row[key] for key in KEYS] for row in read_metrics(run)]
        for run in sorted((campaign / "runs").iterdir())
    }


def test_jumps_of_an_hour_change_nothing_but_timestamps(
    retrain: Call, campaign_file: Path, here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    campaign_file.write_text(
        campaign_file.read_text().replace(
            "max_workers = 2", "max_workers = 2\nrun_timeout = 1000.0\nstall_timeout = 500.0"
        )
        + f'[reward]\nreward = "tests.plugins.killed_once"\nparams.flag = "{here / "killed"}"\n'
    )
    shim = tmp_path_factory.mktemp("shim")
    (shim / "sitecustomize.py").write_text(JUMPING_CLOCK)
    answer = retrain(campaign_file.name, env={**os.environ, "PYTHONPATH": f"{shim}:{ROOT}"})
    assert answer.returncode == 0, answer.stderr
    disturbed = rows_of(here)
    (campaign,) = (here / "logs").iterdir()
    runs = [RunFiles(run) for run in (campaign / "runs").iterdir()]
    stamps = [row["timestamp"] for run in runs for row in read_metrics(run.directory)]
    assert stamps != sorted(stamps)  # it did jump
    assert sorted(len(read_attempts(run.attempts)) for run in runs) == [1, 1, 1, 2]
    assert all(
        [attempt.number for attempt in read_attempts(run.attempts)][-1] == len(read_attempts(run.attempts))
        for run in runs
    )
    assert "done" in retrain("status", "logs", env={**os.environ, "PYTHONPATH": f"{shim}:{ROOT}"}).stdout
    campaign.rename(here / "disturbed")
    undisturbed = (campaign_file.name, "--set", 'campaign.launcher="inline"')
    assert retrain(*undisturbed, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0
    assert rows_of(here) == disturbed
