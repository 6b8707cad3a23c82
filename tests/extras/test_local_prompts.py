"""What would stop a run of the PyTorch backend is found by the plan, before anything is created."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.backends.local.model_files import prompts_problem
from retrain.base.rollouts import Prompt
from tests.extras.tiny_models import save_tiny_model

pytestmark = pytest.mark.extras
Call = Callable[..., subprocess.CompletedProcess[str]]


def test_a_prompt_that_fills_the_context_is_a_problem_and_a_shorter_one_is_none(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", hidden=32, context=12)
    prompts = [Prompt(7, "1" * 12, ""), Prompt(8, "1" * 11, "")]
    found = prompts_problem(model, prompts)
    assert found.startswith(
        "prompt 7 has 12 tokens, which leaves no room in the model's context of 12; shorten"
    )
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


def campaign_of(model: Path | str) -> str:
    return f'[model]\nmodel = "{model}"\n[backend]\nbackend = "local"\n[backend.options]\ndevice = "cpu"\n'


@pytest.mark.parametrize("command", ["explain", "doctor", "run"])
def test_a_model_that_cannot_be_reached_is_told_before_anything_starts(
    retrain: Call, here: Path, command: str
) -> None:
    (here / "c.toml").write_text(campaign_of("some/model"))
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(here), "COLUMNS": "400"}
    online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    refused = retrain(command, "c.toml", env={**online, **nowhere})
    assert refused.returncode == 2
    assert "http://127.0.0.1:9 does not" in refused.stdout + refused.stderr
    assert not (here / "logs").exists()


@pytest.mark.parametrize("command", ["explain", "doctor", "run"])
def test_a_model_that_cannot_fit_is_told_before_anything_starts(
    retrain: Call, here: Path, command: str
) -> None:
    model = Path(save_tiny_model(here / "model", hidden=32))
    header = b'{"layers.0.q_proj.weight": {"dtype": "F32", "shape": [4000000, 1000000]}}'
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (here / "c.toml").write_text(campaign_of(model))
    refused = retrain(command, "c.toml", env={**os.environ, "COLUMNS": "400"})
    assert refused.returncode == 2
    assert "weights 14901" in refused.stdout + refused.stderr
    assert not (here / "logs").exists()


def test_explain_shows_the_memory_of_a_run(retrain: Call, here: Path) -> None:
    (here / "c.toml").write_text(campaign_of(save_tiny_model(here / "model", hidden=32)))
    shown = retrain("explain", "c.toml", "--set", "training.max_tokens=16")
    assert shown.returncode == 0
    assert "memory of a run" in shown.stdout
