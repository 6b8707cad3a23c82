"""Loss and gradient of a step with a teacher are those that trainers of TRL gave on the same batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.trl_teacher import Case, our_gradient, save_models
from retrain.base.rollouts import Prompt, Rollout

FILE = Path(__file__).parents[1] / "data" / "trl_teacher.jsonl"
RECORD, *CASES = map(json.loads, FILE.read_text().splitlines())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_models(tmp_path_factory.mktemp("models"))


def named(recorded: dict) -> str:
    return "-".join(str(recorded[key]) for key in ("trainer", "beta", "temperature", "lora"))


def batch_of(case: Case) -> list[Rollout]:
    rows = RECORD["batches"]["adapters" if case.lora else "all"]
    numbers = {text: number for number, text in enumerate(dict.fromkeys(row["prompt"] for row in rows))}
    return [
        Rollout(
            Prompt(numbers[row["prompt"]], row["prompt"], ""),
            tokens=tuple(row["tokens"]),
            logprobs=np.array(row["logprobs"]),
        )
        for row in rows
    ]


@pytest.mark.parametrize("recorded", CASES, ids=named)
def test_a_step_with_a_teacher_is_trls(models: tuple[str, str], recorded: dict) -> None:
    case = Case(**{key: recorded[key] for key in ("trainer", "mode", "beta", "temperature", "lora")})
    loss, gradient = our_gradient(case, *models, batch_of(case))
    if case.mode == "jsd":
        assert loss == pytest.approx(recorded["loss"], rel=1e-5)
    assert np.linalg.norm(gradient) == pytest.approx(recorded["norm"], rel=1e-5)
    theirs = np.array(recorded["gradient"])
    apart = gradient[:: RECORD["every"]] - theirs
    assert np.linalg.norm(apart) <= 1e-5 * np.linalg.norm(theirs)
