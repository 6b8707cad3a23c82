"""A policy learns to use a calculator, on sums that it gets wrong without one."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from retrain import worker
from retrain.records.metrics import read_metrics
from tests.test_trainer import make_run

SUMS = '''
"""Sums of two numbers of two digits, and a calculator."""

import random

from retrain.rollouts import Prompt
from retrain.tasks import Task


def s(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def build(*, seed):
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    chosen = random.Random(seed).sample(pairs, 2000)
    prompts = tuple(Prompt(n, f"{a}+{b}=", str(a + b)) for n, (a, b) in enumerate(chosen))
    return Task(prompts[:1800], prompts[1800:], "0123456789+=s(,)!", 3)
'''
RUN: dict[str, Any] = {
    "training": {
        "seed": 0,
        "batch_size": 16,
        "group_size": 8,
        "max_tokens": 16,
        "temperature": 1.0,
        "lr": 3e-3,
        "max_steps": 50,
        "save_every": 0,
        "eval_every": 50,
    },
    "algorithm": {"advantage_mode": "grpo"},
    "environment": {"environment": "tools", "max_turns": 2},
    "warmup": {"steps": 600, "batch_size": 64, "lr": 1e-2},
    "backend": {"backend": "numpy", "options": {"hidden": 128}},
}


def written(count: int) -> str:
    """Return rows in which three of ten first turns are calls, and the others wrong sums."""
    choice, rows = random.Random(1), []
    for _ in range(count):
        a, b = choice.randrange(10, 100), choice.randrange(10, 100)
        wrong = str(a + b + choice.choice([-20, -11, -10, -2, -1, 1, 2, 10, 11, 20]))
        call = f"s({a},{b})"
        rows.append({"prompt": f"{a}+{b}=", "completion": call if choice.random() < 0.3 else wrong})
        rows.append({"prompt": f"{a}+{b}={call}{a + b}", "completion": str(a + b)})
    return "\n".join(map(json.dumps, rows)) + "\n"


@pytest.mark.timeout(600)
def test_a_policy_learns_to_use_a_calculator(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(here))
    (here / "sums_to_learn.py").write_text(SUMS)
    (here / "rows.jsonl").write_text(written(4000))
    options = {"tools": ["sums_to_learn.s"], "calls": "python", "wrong_call": "!"}
    solved = {}
    for turns in (1, 2):
        raw = {
            **RUN,
            "data": {"task": "sums_to_learn.build", "eval_prompts": 100},
            "environment": {**RUN["environment"], "max_turns": turns, "options": options},
            "warmup": {**RUN["warmup"], "path": str(here / "rows.jsonl")},
        }
        run = make_run(here / str(turns), raw)
        assert worker.run(run.directory, threading.Event()) == 0
        rows = read_metrics(run.directory)
        solved[turns] = rows[-1]["eval_correct_rate"]
    assert solved[1] < 0.2  # without an answer of the calculator
    assert solved[2] > 0.7
    assert rows[0]["tool_calls"] < 64 < 100 < rows[-1]["tool_calls"]  # of 128 episodes
