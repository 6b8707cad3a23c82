"""A policy learns to use what an environment answers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from tests.trainer.test_trainer import make_run

GAME = {
    "training": {
        "seed": 1,  # one seed of six stays at a strategy that wins two games of three
        "max_steps": 100,  # by the fortieth it has learned
        "batch_size": 8,
        "group_size": 16,
        "max_tokens": 4,
        "temperature": 1.0,
        "lr": 1e-2,
        "entropy_bonus": 0.003,
        "save_every": 0,
    },
    "algorithm": {"advantage_mode": "grpo"},
    "data": {"task": "guess", "options": {"digits": 1, "base": 3}},
    "environment": {"environment": "guess", "max_turns": 2, "max_turn_tokens": 2},
}


def solved(directory: Path, raw: dict) -> float:
    """Return the share of games that are won in the last steps of a run."""
    run = make_run(directory, raw)
    assert worker.run(run.directory, threading.Event()) == 0
    rows = read_metrics(run.directory)
    assert rows[0]["correct_rate"] < 0.3
    return sum(row["correct_rate"] for row in rows[-20:]) / 20


@pytest.mark.timeout(600)  # seconds of the processor, on machines that do other things as well
def test_with_answers_a_policy_wins_games_that_a_single_guess_cannot(tmp_path: Path) -> None:
    once = {**GAME, "environment": {**GAME["environment"], "max_turns": 1}}
    once["training"] = {**GAME["training"], "max_steps": 60}
    assert solved(tmp_path / "once", once) < 0.5  # one of three
    assert solved(tmp_path / "twice", GAME) > 0.9
