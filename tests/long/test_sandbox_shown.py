"""Where programs run is said before, at and after a campaign."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

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
from retrain.base.rollouts import Prompt
from retrain.plugins.tasks import Task

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
    assert (found["found"], found["state"]) == ("process", "warning")


OPENS_WIDE = """
from dataclasses import replace
from retrain import find_plugin
import os

def open_sandbox():
    return replace(find_plugin("sandbox", "process")(), readable=[os.path.abspath(".")])

def open_unknown():
    return replace(find_plugin("sandbox", "process")(), name="unknown", readable=None)
"""
NEEDS_A_SANDBOX = {
    "a reward": 'params.sandbox = "wide.open_sandbox"\n',
    "a tool": '[environment]\nenvironment = "tools"\noptions.calls = "python"\n'
    'options.sandbox = "wide.open_sandbox"\n',
}


@pytest.mark.parametrize("where", NEEDS_A_SANDBOX)
def test_a_campaign_that_programs_could_read_is_refused(where: str, retrain: Retrain, here: Path) -> None:
    (here / "adding.py").write_text(TASK)
    (here / "wide.py").write_text(OPENS_WIDE)
    (here / "c.toml").write_text(TOML.format(reward="python") + NEEDS_A_SANDBOX[where])
    told = f"the working directory ({here}) lies in {here}, which programs of a policy can read"
    refused = retrain("run", "c.toml")
    assert refused.returncode == 2
    assert told in " ".join(refused.stderr.split())
    checks = json.loads(retrain("doctor", "c.toml", "--json").stdout)["checks"]
    found = [check["found"] for check in checks if check["state"] == "missing"]
    assert [line for line in found if told in line]
    assert [line for line in found if "[logging].log_dir (logs) lies in" in line]


def test_a_sandbox_that_does_not_say_what_programs_can_read_is_told(retrain: Retrain, here: Path) -> None:
    (here / "adding.py").write_text(TASK)
    (here / "wide.py").write_text(OPENS_WIDE)
    (here / "c.toml").write_text(TOML.format(reward="python") + 'params.sandbox = "wide.open_unknown"\n')
    told = "it does not say what programs can read of this machine"
    warnings = json.loads(retrain("explain", "c.toml", "--json").stdout)["warnings"]
    assert [line for line in warnings if told in line]
    checks = json.loads(retrain("doctor", "c.toml", "--json").stdout)["checks"]
    assert [check["state"] for check in checks if check["what"] == "sandbox"] == ["warning"]
