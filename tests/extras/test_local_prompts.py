"""Prompts that fill a model's context are found by the plan, without torch and before anything is created."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.backends.local.names import prompts_problem
from retrain.rollouts import Prompt
from tests.extras.tiny_models import save_tiny_model

pytestmark = pytest.mark.extras
Call = Callable[..., subprocess.CompletedProcess[str]]


def test_a_prompt_that_fills_the_context_is_a_problem_and_a_shorter_one_is_none(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", hidden=32, context=12)
    prompts = [Prompt(7, "1" * 12, ""), Prompt(8, "1" * 11, "")]
    found = prompts_problem(model, prompts)
    assert found.startswith("1 prompts fill the model's context of 12 tokens (prompt 7 has 12)")
    assert prompts_problem(model, prompts[1:]) == ""


def test_the_plan_refuses_them_once_and_creates_nothing(retrain: Call, here: Path) -> None:
    model = save_tiny_model(here / "model", hidden=32, context=12)
    (here / "c.toml").write_text(
        f'[model]\nmodel = "{model}"\n[backend]\nbackend = "local"\n[campaign]\nseeds = [0, 1]\n'
        '[data]\ntask = "successor"\n[data.options]\ndigits = 14\n'
    )
    refused = retrain("run", "c.toml")
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert refused.stderr.startswith("c.toml [data]: ")
    assert not (here / "logs").exists()
