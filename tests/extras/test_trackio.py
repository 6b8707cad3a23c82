"""Trackio's own file has what runs logged, without a network, also of a run that was killed and went on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retrain.campaign.run import run_campaign
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts

pytestmark = [pytest.mark.extras, pytest.mark.timeout(300)]
NOWHERE = "http://127.0.0.1:1"
CAMPAIGN = """
[training]
batch_size = 2
group_size = 4
max_tokens = 4
save_every = 5
eval_at_start = false  # the reward counts the completions of steps

[data]
task = "successor"

[reward]
reward = "tests.logger_plugins.killed_when_logged"
params = { loggers = 1 }

[logging]
loggers = ["tests.logger_plugins.watched_trackio"]

[campaign]
name = "study"
seeds = [0, 1]
max_steps = 12
parallel = true
max_workers = 2

[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"
"""
READ = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
project = sys.argv[1]
print(json.dumps([
    [run["name"], SQLiteStorage.get_run_config(project, run_id=run["id"]),
     SQLiteStorage.get_logs(project, run_id=run["id"])]
    for run in SQLiteStorage.get_run_records(project)
]))
"""


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign of two runs beside each other, whose second was killed after step 8."""
    here = tmp_path_factory.mktemp("here")
    (here / "study.toml").write_text(CAMPAIGN)
    with pytest.MonkeyPatch.context() as patch:
        for name in (name for name in os.environ if name.startswith(("TRACKIO_", "HF_"))):
            patch.delenv(name)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            patch.setenv(name, NOWHERE)
        patch.setenv("MY_SECRET", "canary-4711")
        patch.chdir(here)
        outcome = run_campaign(here / "study.toml")
    assert outcome.exit_code == 0
    return here / outcome.directory


@pytest.fixture(scope="module")
def logged(campaign: Path) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Settings and rows of each run, as Trackio reads them."""
    env = os.environ | {"TRACKIO_DIR": str(campaign / "trackio")}
    command = [sys.executable, "-c", READ, campaign.name]
    answer = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    runs = json.loads(answer.stdout.splitlines()[-1])
    assert len(runs) == 2  # the killed one is continued
    return {name: (config, rows) for name, config, rows in runs}


@pytest.mark.parametrize("run_id", ["grpo_s0", "grpo_s1"])
def test_trackio_has_every_step_once_also_of_a_killed_run(
    run_id: str, campaign: Path, logged: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]
) -> None:
    run = campaign / "runs" / run_id
    endings = [attempt.ending for attempt in read_attempts(run / "attempts.jsonl")]
    assert endings == (["infrastructure", "done"] if run_id == "grpo_s1" else ["done"])
    rows = logged[run_id][1]
    steps = [row["step"] for row in rows if "mean_reward" in row]
    assert steps == list(range(1, 13))
    rewards = {row["step"]: row["mean_reward"] for row in read_metrics(run)}
    assert {row["step"]: row["mean_reward"] for row in rows if "mean_reward" in row} == rewards


def test_trackio_has_settings_condition_and_seed(
    campaign: Path, logged: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]
) -> None:
    settings = logged["grpo_s1"][0]
    assert (settings["campaign"], settings["condition"], settings["seed"]) == (campaign.name, "grpo", 1)
    assert (settings["training"]["batch_size"], settings["_Group"]) == (2, "grpo")


def test_status_names_no_missing_row(campaign: Path) -> None:
    runs = (campaign / "runs").iterdir()
    assert [read_attempts(run / "attempts.jsonl")[-1].message for run in runs] == ["", ""]


def test_no_key_is_written(campaign: Path) -> None:
    files = [path for path in (campaign / "trackio").rglob("*") if path.is_file()]
    assert files
    assert not any(b"canary-4711" in path.read_bytes() for path in files)
