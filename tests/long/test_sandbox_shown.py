"""Where programs run is said before, at and after a campaign."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

Retrain = Callable[..., subprocess.CompletedProcess[str]]

TOML = """
[training]
max_steps = 1
batch_size = 1
group_size = 2
max_tokens = 4
[data]
task = "adding.build"
[campaign]
seeds = [0]
[reward]
reward = "{reward}"
sandbox = "process"
"""
TASK = """
from retrain.rollouts import Prompt
from retrain.tasks import Task

def build(*, seed):
    prompts = [Prompt(n, str(n), "assert f(1) == 2") for n in range(4)]
    return Task(train=tuple(prompts[:2]), held_out=tuple(prompts[2:]), alphabet="0123abc", longest_answer=2)
"""
WEIGHTED = "\n[reward.params.parts]\nmatch = 0.5\npython = 0.5\n"


def test_explain_and_status_name_the_sandbox_and_warn_of_a_weak_one(retrain: Retrain, here: Path) -> None:
    (here / "adding.py").write_text(TASK)
    (here / "c.toml").write_text(TOML.format(reward="weighted") + WEIGHTED)
    explained = json.loads(retrain("explain", "c.toml", "--json").stdout)
    assert explained["sandboxes"] == ["process"]
    assert [line for line in explained["warnings"] if line.startswith('sandbox "process"')]
    assert retrain("run", "c.toml").returncode == 0
    (campaign,) = json.loads(retrain("status", "--json").stdout)["campaigns"]
    assert [run["sandbox"] for run in campaign["runs"]] == ["process"]


def test_explain_warns_of_tests_that_a_program_can_reach(retrain: Retrain, here: Path) -> None:
    (here / "adding.py").write_text(TASK)
    (here / "c.toml").write_text(TOML.format(reward="python") + "params.shared = true\n")
    warnings = json.loads(retrain("explain", "c.toml", "--json").stdout)["warnings"]
    assert [line for line in warnings if line.startswith("shared = true")]


def test_a_reward_that_runs_no_programs_needs_no_sandbox(retrain: Retrain, here: Path) -> None:
    (here / "adding.py").write_text(TASK)
    (here / "c.toml").write_text(TOML.format(reward="match"))
    assert json.loads(retrain("explain", "c.toml", "--json").stdout)["sandboxes"] == []


def test_doctor_checks_the_sandbox_that_a_file_needs(retrain: Retrain, here: Path) -> None:
    (here / "adding.py").write_text(TASK)
    (here / "c.toml").write_text(TOML.format(reward="python"))
    checks = json.loads(retrain("doctor", "c.toml", "--json").stdout)["checks"]
    (found,) = [check for check in checks if check["what"] == "sandbox"]
    assert (found["found"], found["verdict"]) == ("process", "warning")
