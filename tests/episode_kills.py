"""Runs whose episodes end by SIGKILL, and their judge: a resumed run must equal an undisturbed one.

Each life is a real worker in a process of its own, forked so that a kill costs no start-up. The environment
sends the signal in the middle of an episode: at a call of it that is drawn by lot.
"""

from __future__ import annotations

import importlib
import json
import math
import operator
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts
from retrain.records.samples import read_samples
from retrain.trainer import checkpoint, worker
from tests import deadly
from tests.clocks import without_times
from tests.trainer.test_trainer import make_run

PROCESSES = 2
STATES, WEIGHTS = ("policy.json", "trainer.json"), "policy.npz"  # of a checkpoint
MOST_CALLS = 300  # of the environment before a kill: in the third step, so that most lives save a checkpoint
PRELOADED = (
    "retrain.trainer.opening",
    "retrain.trainer.programs",
    "retrain.backends.numpy.policy",
    "retrain.plugins.tasks.guess",
)
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
}
OF_PROGRAMS = {"environment": "tests.deadly.Program", "max_turns": deadly.TURNS, "max_turn_tokens": 5}
OF_GAMES = {**OF_PROGRAMS, "environment": "tests.deadly.Deadly"}
TABLES: dict[str, dict[str, Any]] = {
    "plain": OF_GAMES,
    "threads": {**OF_GAMES, "threads": True},
    "async": {**OF_GAMES, "environment": "tests.deadly.Awaiting"},
    "processes": {**OF_GAMES, "processes": PROCESSES},
    "program": OF_PROGRAMS,
}


@dataclass
class Kills:
    """How often runs were killed, and what differs from an undisturbed run."""

    kills: int = 0
    runs: int = 0
    resumed_from: set[int] = field(default_factory=set)  # steps
    problems: list[str] = field(default_factory=list)


def kill_within_episodes(directory: Path, kills: int, seed: int = 0, way: str = "plain") -> Kills:
    """Kill runs in one episode after another until so many kills were sent; compare each when it is done.

    Args:
        way: in which episodes are played, of `TABLES`. Only with "plain" the same turns are sampled together
            each time; else rounding may differ.
    """
    for name in PRELOADED:  # a life would import them each time
        importlib.import_module(name)
    chance, found = random.Random(seed), Kills()
    run = {**RUN, "environment": TABLES[way]}
    equal = operator.eq if way == "plain" else near
    most = MOST_CALLS // TABLES[way].get("processes", 1)  # of which each counts its own
    expected = make_run(directory / "undisturbed", run)
    if ending := _life(expected.directory, 0):
        raise RuntimeError(f"the undisturbed run ended with status {ending}")
    while found.kills < kills and not found.problems:
        found.runs += 1
        files = make_run(directory / f"killed-{found.runs}", run)
        while ending := _life(files.directory, chance.randint(1, most)):
            if ending != -signal.SIGKILL:
                found.problems.append(f"run {found.runs} ended with status {ending}")
                return found
            found.kills += 1
        found.resumed_from |= {attempt.resumed_from_step for attempt in read_attempts(files.attempts)}
        found.problems += [f"run {found.runs}: {what}" for what in _differences(files, expected, equal)]
        if not found.problems:
            shutil.rmtree(files.directory)
    return found


def _life(directory: Path, calls: int) -> int:
    """Work on a run in a process that a call of its environment kills; return how it ended, 0 if done."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.environ |= {deadly.CALLS: str(calls), deadly.WORKER: str(os.getpid())}
            code = worker.run(directory, threading.Event())
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _differences(files: RunFiles, expected: RunFiles, equal: Callable[[Any, Any], bool]) -> list[str]:
    """Return what of a run's records differs from those of another one."""
    pairs = {
        "rows": [without_times(read_metrics(one.directory)) for one in (files, expected)],
        "samples": [_shown(one) for one in (files, expected)],
        "checkpoints": [_checkpoint(one) for one in (files, expected)],
    }
    return [f"{what} differ" for what, (ours, theirs) in pairs.items() if not equal(ours, theirs) or not ours]


def near(ours: Any, theirs: Any) -> bool:
    """Whether two records differ by rounding only."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        pairs = [
            (ours[key], theirs.get(key)) for key in ours if key != "first_steps"
        ]  # a digest of all digits
        return ours.keys() == theirs.keys() and all(near(value, other) for value, other in pairs)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(near, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-4, abs_tol=1e-5)
    return bool(ours == theirs)


def _shown(files: RunFiles) -> Sequence[dict[str, Any]]:
    return [{**row, "attempt": 0} for row in read_samples(files.samples)]


def _checkpoint(files: RunFiles) -> dict[str, Any]:
    """Return the last checkpoint: weights, optimizer, random generators and data cursor."""
    found = checkpoint.newest(files.checkpoints)
    if found is None:
        return {}
    states = {name: json.loads((found.directory / name).read_text()) for name in STATES}
    with np.load(found.directory / WEIGHTS) as arrays:
        return {**states, **{name: array.tolist() for name, array in arrays.items()}}
