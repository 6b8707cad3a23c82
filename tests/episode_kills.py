"""Runs whose episodes end by SIGKILL, and their judge: a resumed run must equal an undisturbed one.

Each life is a real worker in a process of its own, forked so that a kill costs no start-up. The environment
sends the signal in the middle of an episode: at a call of it that is drawn by lot.
"""

from __future__ import annotations

import importlib
import os
import random
import shutil
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain import worker
from retrain.environments.guess import Game
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts
from retrain.records.samples import read_samples
from retrain.rollouts import Prompt
from retrain.trainer import checkpoint
from tests.test_trainer import make_run, without_times

MOST_CALLS = 300  # of the environment before a kill: in the third step, so that most lives save a checkpoint
PRELOADED = ("retrain.trainer.opening", "retrain.backends.numpy.policy", "retrain.tasks.guess")
RUN: dict[str, Any] = {
    "training": {
        "seed": 7,
        "max_steps": 8,
        "batch_size": 3,
        "group_size": 8,
        "max_tokens": 20,
        "temperature": 1.0,
        "lr": 1e-2,
        "save_every": 1,
    },
    "algorithm": {"advantage_mode": "grpo"},
    "data": {"task": "guess", "options": {"digits": 1, "base": 4}},
    "environment": {"environment": "tests.episode_kills.Deadly", "max_turns": 4, "max_turn_tokens": 5},
}
_left = [0]  # calls until the process is killed; below 1: never


class Deadly(Game):
    """Guess a number, with an answer to guesses of any form; one call may be the process's last."""

    def start(self, prompt: Prompt) -> str:
        _live_on()
        return super().start(prompt)

    def step(self, completion: str) -> tuple[str, float, bool]:
        _live_on()
        signs, reward, is_over = super().step(completion)
        in_form = bool(signs)
        return (
            (signs, reward, is_over) if in_form else ("?", 0.02 * sum(map(str.isdecimal, completion)), False)
        )


def _live_on() -> None:
    _left[0] -= 1
    if _left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Kills:
    """How often runs were killed, and what differs from an undisturbed run."""

    kills: int = 0
    runs: int = 0
    resumed_from: set[int] = field(default_factory=set)  # steps
    problems: list[str] = field(default_factory=list)


def kill_within_episodes(directory: Path, kills: int, seed: int = 0) -> Kills:
    """Kill runs in one episode after another until so many kills were sent; compare each when it is done."""
    for name in PRELOADED:  # a life would import them each time
        importlib.import_module(name)
    chance, found = random.Random(seed), Kills()
    expected = make_run(directory / "undisturbed", RUN)
    if ending := _life(expected.directory, 0):
        raise RuntimeError(f"the undisturbed run ended with status {ending}")
    while found.kills < kills and not found.problems:
        found.runs += 1
        files = make_run(directory / f"killed-{found.runs}", RUN)
        while ending := _life(files.directory, chance.randint(1, MOST_CALLS)):
            if ending != -signal.SIGKILL:
                found.problems.append(f"run {found.runs} ended with status {ending}")
                return found
            found.kills += 1
        found.resumed_from |= {attempt.resumed_from_step for attempt in read_attempts(files.attempts)}
        found.problems += [f"run {found.runs}: {what}" for what in _differences(files, expected)]
        if not found.problems:
            shutil.rmtree(files.directory)
    return found


def _life(directory: Path, calls: int) -> int:
    """Work on a run in a process that a call of its environment kills; return how it ended, 0 if done."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            _left[0] = calls
            code = worker.run(directory, threading.Event())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _differences(files: RunFiles, expected: RunFiles) -> list[str]:
    """Return what of a run's records differs from those of another one."""
    pairs = {
        "rows": [without_times(read_metrics(one.directory)) for one in (files, expected)],
        "samples": [_shown(one) for one in (files, expected)],
        "checkpoints": [_checkpoint(one) for one in (files, expected)],
    }
    return [f"{what} differ" for what, (ours, theirs) in pairs.items() if ours != theirs or not ours]


def _shown(files: RunFiles) -> Sequence[dict[str, Any]]:
    return [{**row, "attempt": 0} for row in read_samples(files.samples)]


def _checkpoint(files: RunFiles) -> str:
    """Return the digests of the last checkpoint: of weights, optimizer, random generators and data cursor."""
    found = checkpoint.newest(files.checkpoints)
    return (found.directory / "digests.json").read_text() if found else ""
