"""A real language model learns sums by GRPO, is killed and resumed; its report and samples are readable."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from retrain.base.errors import EXIT_DONE
from retrain.campaign.run import reopen
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_start
from tests.clocks import without_times
from tests.real.smollm2 import save_smollm2

ROOT = Path(__file__).parents[2]
STEPS, SAVED, KILLED = 6, 3, 4  # the kill comes after a step that is then taken again
CAMPAIGN = """
[model]
model = "model"
lora_rank = 16
[training]
batch_size = 4
group_size = 4
max_tokens = 10
temperature = 0.7
lr = 5e-4
save_every = 3
[algorithm]
loss_mode = "ppo"
[data]
task = "jsonl"
eval_prompts = 16
[data.options]
path = "sums.jsonl"
held_out = 0.3
template = "What is {prompt}? Answer with the number only."
[reward]
reward = "tests.real.smollm2.last_number"
[backend]
backend = "local"
[backend.options]
device = "cpu"
local_files_only = true
chat_template = true
system_prompt = "Calculate."
[logging]
samples_per_step = 4
[campaign]
seeds = [0]
retries = 0
launcher = "inline"
[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"
training = { max_steps = 6 }
"""


def retrain(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "retrain", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def taken(here: Path, step: int) -> list[dict[str, Any]]:
    """Every row that was written of a step, attempt after attempt."""
    files = here.glob("logs/*/runs/grpo_s0/metrics.jsonl")
    lines = (line for file in files for line in file.read_text().splitlines(keepends=True))
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if row.get("step") == step]


def write_sums(file: Path) -> None:
    """One-digit sums, and two-digit numbers plus a digit that carries nothing."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    pairs += [(a, b) for a in range(10, 100) for b in range(10 - a % 10)]
    random.Random(0).shuffle(pairs)
    rows = ({"prompt": f"{a} + {b}", "answer": str(a + b)} for a, b in pairs[:200])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign that was killed and resumed."""
    here = tmp_path_factory.mktemp("real")
    save_smollm2(here / "model")
    write_sums(here / "sums.jsonl")
    (here / "sums.toml").write_text(CAMPAIGN)
    with (here / "output").open("w") as output:
        running = subprocess.Popen(
            [sys.executable, "-m", "retrain", "run", "sums.toml"],
            cwd=here,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while not taken(here, KILLED) and running.poll() is None:
            time.sleep(0.1)
        running.kill()
        running.wait()
    (found,) = (here / "logs").iterdir()
    with chdir(here):
        assert reopen(found).execute().exit_code == EXIT_DONE  # in this process, which has imported torch
    return found


def test_it_answers_more_held_out_sums_than_before(campaign: Path) -> None:
    files = RunFiles(campaign / "runs" / "grpo_s0")
    before, after = read_start(files).metrics, json.loads(files.done.read_text())["result"]
    assert before["eval_prompts"] == after["eval_prompts"] == 16
    assert after["eval_correct_rate"] >= before["eval_correct_rate"] + 0.2


def test_steps_that_are_taken_again_after_a_kill_are_identical(campaign: Path) -> None:
    here = campaign.parents[1]
    rows = read_metrics(campaign / "runs" / "grpo_s0")
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    for step in range(SAVED + 1, KILLED + 1):
        first, again = without_times(taken(here, step))
        assert first == again


def test_its_samples_and_report_can_be_read(campaign: Path) -> None:
    shown = retrain("samples", campaign, "grpo_s0", "--best", cwd=campaign).stdout
    assert "What is" in shown
    assert "Answer with the number only." in shown
    retrain("report", campaign, "-o", "report.html", cwd=campaign)
    page = (campaign / "report.html").read_text()
    assert all(word in page for word in ("grpo", "mean_reward"))


def test_its_memory_was_estimated_within_fifteen_percent(campaign: Path) -> None:
    script = Path(__file__).with_name("measured_memory.py")
    done = subprocess.run(
        [sys.executable, script, campaign.parents[1] / "model"],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
    )
    estimated, measured = map(int, done.stdout.split())
    assert 0.85 <= estimated / measured <= 1.15
