"""Beside programs of the policy, no process of a campaign can be read by others of the same user."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
TOML = """
[training]
max_steps = 1
batch_size = 1
group_size = 2
max_tokens = 4
[data]
task = "own.build"
[campaign]
seeds = [0]
[logging]
loggers = ["own.track"]
[reward]
reward = "weighted"
sandbox = "process"
[reward.params.parts]
python = 0.5
waits = { weight = 0.5, reward = "custom", params = { path = "own.waits" } }
"""
OWN = """
import time
from pathlib import Path
from retrain.plugins.loggers.mlflow import LoggerProcess
from retrain.base.rollouts import Prompt
from retrain.plugins.tasks import Task

def build(*, seed):
    prompts = [Prompt(n, str(n), "assert f(1) == 2") for n in range(4)]
    return Task(train=tuple(prompts[:2]), held_out=tuple(prompts[2:]), alphabet="0123abc", longest_answer=2)

def track(run):
    return LoggerProcess("tests.logger_plugins", "recording", run, {})

def waits(completion, prompt):
    while not Path(GO).exists(): time.sleep(0.05)
    return 1.0
"""
READS = """
import sys
def is_readable(pid):
    try: return bool(open(f"/proc/{pid}/environ").read())
    except OSError: return False
print(*filter(is_readable, sys.argv[1:]))
"""


def without_privileges() -> None:
    """Give up what lets root read every process; an ordinary user has nothing to give up."""
    for capability in range(64):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)


def readable(pids: list[int]) -> set[int]:
    """Return the processes whose environment another process of the same user can read."""
    command = [sys.executable, "-c", READS, *map(str, pids)]
    told = subprocess.check_output(command, text=True, preexec_fn=without_privileges)
    return set(map(int, told.split()))


@pytest.mark.skipif(sys.platform != "linux", reason="hides processes by Linux's means")
def test_every_process_of_a_campaign_that_runs_programs_is_hidden(here: Path) -> None:
    go = here / "go"
    (here / "own.py").write_text(f"GO = {str(go)!r}{OWN}")
    (here / "c.toml").write_text(TOML)
    command = [sys.executable, "-m", "retrain", "run", "c.toml"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, preexec_fn=without_privileges) as campaign:
        try:
            hidden: set[str] = set()
            while campaign.poll() is None and len(hidden) < 6:  # until all of them run, and have hidden
                below = psutil.Process(campaign.pid).children(recursive=True)
                every = [campaign.pid, *(process.pid for process in below)]
                hidden = set() if readable(every) else set(map(str, every))
            assert campaign.poll() is None
        finally:
            go.touch()
    assert campaign.returncode == 0


TELLS = """
import ctypes, os, sys
FIRST = {"retrain.base." + name for name in ("hide_process", "errors", "streams", "distribution")}
FIRST |= {"retrain.base", "retrain.trainer"}  # packages that hold a docstring only
told = []
def tell(event, arguments):
    if event == "import" and arguments[0].startswith("retrain.") and arguments[0] not in FIRST and not told:
        told.append(arguments[0])
        with open(os.environ["TOLD"], "a") as file:
            print(ctypes.CDLL(None).prctl(3), *sys.orig_argv[1:], file=file)
sys.addaudithook(tell)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="hides processes by Linux's means")
def test_every_process_hides_before_it_imports_anything(here: Path) -> None:
    (here / "go").touch()
    (here / "own.py").write_text(f"GO = {str(here / 'go')!r}{OWN}")
    (here / "c.toml").write_text(TOML)
    (here / "sitecustomize.py").write_text(TELLS)
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{ROOT}", "TOLD": str(here / "told")}
    for command in (
        ["retrain", "run", "c.toml"],
        ["retrain.base.hide_process", "retrain.backends.engines.shared_server", "nowhere"],
    ):
        subprocess.run([sys.executable, "-P", "-m", *command], env=environment, stdin=subprocess.DEVNULL)
    told = (here / "told").read_text().splitlines()
    names = {word for line in told for word in line.split() if word.startswith("retrain")}
    processes = {
        "trainer.worker",
        "plugins.rewards.pool",
        "plugins.loggers.mlflow",
        "backends.engines.shared_server",
        "base.hide_process",
    }
    assert names == {"retrain", *(f"retrain.{name}" for name in processes)}
    assert [line for line in told if not line.startswith("0 ")] == []


@pytest.mark.skipif(sys.platform != "linux", reason="hides processes by Linux's means")
def test_a_process_that_does_not_hide_can_be_read() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=without_privileges,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert readable([process.pid]) == {process.pid}
