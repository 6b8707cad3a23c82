"""Calibration by real runs, and the file that says why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.campaign.calibrate import to_toml
from retrain.campaign.calibrate.advice import Advice
from retrain.config.load import load_config, parse
from tests.semaphore_processes import wait_until

Called = Callable[..., subprocess.CompletedProcess[str]]
QUICK = ("--probe-seconds", "0.2")
TOML = """
# what I wrote
[training]
batch_size = 4
group_size = 4
max_tokens = 64  # on purpose
temperature = 1.0
lr = 5e-3
[data]
task = "successor"
[campaign]
seeds = [0, 1]
max_steps = 50
parallel = true
max_workers = 2
stagger_seconds = 5.0
[[campaign.conditions]]
name = "one"
advantage_mode = "grpo"
[[campaign.conditions]]
name = "two"
advantage_mode = "maxrl"
training = { max_tokens = 8 }
"""


@settings(max_examples=30)
@given(workers=st.integers(1, 99))
def test_a_calibrated_file_says_what_was_and_why_and_is_valid(workers: int) -> None:
    speed = 1.0  # all that a fifo of whole batches takes
    advised = [
        Advice("campaign.max_workers", 2, workers, "measured"),
        Advice("rate_limiter.rate_limit_speed_batch_per_sim", 0.0, speed, 'it "said" so\n'),
        Advice("training.lr", 5e-3, 5e-3, "stays"),
    ]
    text = to_toml(tomllib.loads(TOML), advised, "c.toml")
    tables = tomllib.loads(text)
    assert tables["campaign"]["max_workers"] == workers
    assert tables["rate_limiter"] == {"rate_limit_speed_batch_per_sim": speed}
    assert ("# was 2: measured\nmax_workers" in text) == (workers != 2)
    assert "stays" not in text
    assert (
        parse(tables, "c.toml").campaign.conditions
        == parse(tomllib.loads(TOML), "c.toml").campaign.conditions
    )


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "campaign.toml").write_text(TOML)
    return tmp_path


@pytest.fixture
def calibrate(retrain: Called) -> Called:
    """The command with few steps and short probes."""

    def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        surroundings = {**os.environ, "COLUMNS": "200", **environment}
        return retrain("calibrate", "campaign.toml", "--steps", "6", *QUICK, *arguments, env=surroundings)

    return call


def test_a_file_is_calibrated_by_real_runs(here: Path, calibrate: Called, retrain: Called) -> None:
    done = calibrate("--most-workers", "2", "--json", "--budget", "99999999999999d")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    found = json.loads(done.stdout)
    assert [split["condition"] for split in found["steps"]] == ["one", "two"]
    assert found["tried"] == ["pilot", "workers-1", "workers-2", "batch"]
    assert {m["workers"] for m in found["scaling"]["measured"]} == {1, 2}
    assert found["memory"]["worker"] > 10e6  # a Python process with numpy
    assert found["before"]["p50_s"] > 0
    values = {a["key"]: (a["now"], a["value"]) for a in found["advice"]}
    assert values["training.max_tokens"][0] == 64
    assert values["two: training.max_tokens"][0] == 8
    assert [(one["condition"], one["allowed"]) for one in found["lengths"]] == [("one", 64), ("two", 8)]
    assert values["campaign.stagger_seconds"] == (5.0, 0.0)
    calibrated = load_config(here / "campaign.calibrated.toml")
    assert calibrated.campaign.stagger_seconds == 0.0
    assert (here / "campaign.toml").read_text() == TOML
    assert (
        json.loads(retrain("status", "logs", "--json").stdout)["campaigns"] == []
    )  # benchmarks are never among results


def test_a_budget_that_is_over_ends_the_benchmarks_and_reports(here: Path, calibrate: Called) -> None:
    done = calibrate("--budget", "2s", "--steps", "1000")
    assert done.returncode in (0, 4), done.stderr  # 4: this machine took no two steps in that time
    assert "skipped: workers-1: the time budget is used up" in done.stdout
    assert ("breakdown of step time" in done.stdout) == (done.returncode == 0)
    assert (here / "campaign.calibrated.toml").exists() == (done.returncode == 0)


def rows_of_pilot(here: Path) -> int:
    found = here.glob("logs/calibrations/*/pilot*/runs/*/metrics.jsonl")
    return sum(path.read_bytes().count(b"\n") for path in found)


def test_an_interrupt_keeps_what_was_measured_and_still_reports(here: Path) -> None:
    command = [sys.executable, "-m", "retrain", "calibrate", "campaign.toml", "--steps", "1000"]
    with subprocess.Popen(
        command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: rows_of_pilot(here) >= 20 or process.poll() is not None)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "breakdown of step time" in out
    assert "skipped: workers-1: interrupted" in out
    assert (here / "campaign.calibrated.toml").exists()


def test_what_was_measured_is_shown_although_a_benchmark_or_the_file_cannot_be_written(
    here: Path, calibrate: Called
) -> None:
    lines = (
        "from pathlib import Path",
        "def score(text, prompt):",
        "    Path('campaign.calibrated.toml').mkdir(exist_ok=True)",
        "    for benchmarks in Path('logs/calibrations').iterdir():",
        "        (benchmarks / 'batch.toml').mkdir(exist_ok=True)",
        "    return 1.0",
    )
    (here / "blocking.py").write_text("\n".join(lines))
    (here / "campaign.toml").write_text(
        TOML.replace("[campaign]", '[reward]\nreward = "blocking.score"\n[campaign]')
    )
    done = calibrate("--most-workers", "1")
    assert done.returncode == 5
    assert "breakdown of step time" in done.stdout
    assert "recommended settings" in done.stdout
    (skipped,) = (line for line in done.stdout.splitlines() if line.startswith("skipped: batch: "))
    assert skipped.endswith("batch.toml: is not a regular file, so it was not replaced; move it away")
    assert "campaign.calibrated.toml: cannot be written (Is a directory)" in done.stderr


def test_a_pilot_that_runs_out_of_memory_says_at_what_size(here: Path, calibrate: Called) -> None:
    small = TOML.replace("batch_size = 4", "batch_size = 8").replace(
        "[campaign]", '[backend]\nbackend = "tests.small_memory.connect"\n[campaign]\nlauncher = "inline"'
    )
    (here / "campaign.toml").write_text(small)
    done = calibrate(PYTHONPATH=str(Path(__file__).parents[2]))
    assert done.returncode == 0, done.stderr
    assert "8 prompts at a time did not fit in memory" in done.stdout
    assert "32 are configured" in done.stdout  # rollouts at a time: 8 x 4, not the parts of them


def test_a_pilot_in_which_nothing_works_leaves_no_file_and_tries_no_more(
    here: Path, calibrate: Called
) -> None:
    (here / "broken.py").write_text("def score(text, prompt):\n    raise RuntimeError('no')\n")
    broken = TOML.replace("[campaign]", '[reward]\nreward = "broken.score"\n[campaign]\nlauncher = "inline"')
    (here / "campaign.toml").write_text(broken)
    done = calibrate(PYTHONPATH=str(here))
    assert done.returncode == 4
    assert "skipped: batch: no condition completed two steps in the pilot" in done.stdout
    assert not (here / "campaign.calibrated.toml").exists()


@pytest.mark.parametrize("target", ["campaign.toml", "same.toml", "other.toml", "nowhere/c.toml"])
def test_no_file_but_a_calibrated_one_is_ever_replaced(here: Path, calibrate: Called, target: str) -> None:
    (here / "same.toml").symlink_to(here / "campaign.toml")
    (here / "other.toml").write_text("[training]\n")
    done = calibrate("-o", target)
    assert done.returncode == (5 if "nowhere" in target else 2)
    assert f"{target}: " in done.stderr
    assert (here / "campaign.toml").read_text() == TOML
    assert (here / "other.toml").read_text() == "[training]\n"
    assert not (here / "logs").exists()  # nothing ran


def test_a_condition_that_fails_is_not_tried_again(here: Path, calibrate: Called) -> None:
    (here / "broken.py").write_text("def score(text, prompt):\n    raise RuntimeError('no')\n")
    bad = TOML.replace('name = "one"', 'name = "one"\nreward.reward = "broken.score"')
    (here / "campaign.toml").write_text(bad.replace("[campaign]", '[campaign]\nlauncher = "inline"'))
    done = calibrate("--json", PYTHONPATH=str(here))
    found = json.loads(done.stdout)
    assert [split["condition"] for split in found["steps"]] == ["two"]
    (batch,) = here.glob("logs/calibrations/*/batch.toml")
    assert [c["name"] for c in tomllib.loads(batch.read_text())["campaign"]["conditions"]] == ["two"]


def test_a_wrong_file_is_refused_before_anything_runs(here: Path, calibrate: Called) -> None:
    (here / "campaign.toml").write_text(TOML.replace("max_steps", "max_stepz"))
    done = calibrate()
    assert done.returncode == 2
    assert "[campaign].max_stepz: unknown key" in done.stderr
    assert not (here / "logs").exists()


def test_a_span_that_is_none_is_bad_usage(here: Path, calibrate: Called) -> None:
    done = calibrate("--budget", "soon")
    assert done.returncode == 2
    assert "'soon' is not a time span" in done.stderr


def test_all_benchmarks_together_keep_the_budget_in_dollars(here: Path, calibrate: Called) -> None:
    """The pilot costs $8, and ten steps of one worker $7.50."""
    prices = "[budget]\nusd = 13\n[budget.prices.numpy]\nsample = 4000\n"
    (here / "campaign.toml").write_text(TOML.replace("max_tokens = 64", "max_tokens = 32") + prices)
    done = calibrate("--most-workers", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tried"] == ["pilot", "workers-1"]
    assert 8 < found["cost_usd"] <= 13
    assert [reason.split(":")[0] for reason in found["left_out"]] == ["workers-2", "batch"]
    assert all("are left of the budget, and a step of each" in reason for reason in found["left_out"])
