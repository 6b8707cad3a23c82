"""Every template that needs an extra is written, planned and finishes a step, as a user would have it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from retrain.cli import app
from retrain.records.metrics import read_metrics
from tests.extras.tiny_models import save_tiny_model
from tests.tinker_api.running import KEY, MODEL, RunningServer, serve, write_tokenizer
from tests.tinker_api.sdk import CALLS_SDK

pytestmark = CALLS_SDK
SMALLEST = (
    "campaign.max_steps=1",
    "training.max_tokens=4",
    "data.eval_prompts=2",
    "campaign.seeds=[0]",
    "campaign.launcher=inline",
)
DIGITS = "0123456789+="


def with_chat(directory: Path | str) -> str:
    """Return a tokenizer a chat template that shows the last message alone."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = "{{ messages[-1].content }}"
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture
def server(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    yield from serve(here, monkeypatch, DIGITS)


def finish_a_step(template: str, *settings: str) -> None:
    sets = [word for setting in (*SMALLEST, *settings) for word in ("--set", setting)]
    for words in (
        ["init", "--template", template],
        *([do, f"{template}.toml", *sets] for do in ("explain", "run")),
    ):
        answer = CliRunner().invoke(app, words)  # here, because what a run imports takes seconds
        assert answer.exit_code == 0, answer.output


def steps_of(here: Path) -> list[int]:
    return [row["step"] for run in sorted(here.glob("logs/*/runs/*")) for row in read_metrics(run)]


def test_the_template_for_this_machine_finishes_a_step(here: Path) -> None:
    model = with_chat(save_tiny_model(here / "model", hidden=32))
    finish_a_step("local", f"model.model={model}", "backend.options.device=cpu")
    assert steps_of(here) == [1, 1]


def test_the_template_for_the_tinker_api_finishes_a_step(here: Path, server: RunningServer) -> None:
    tokenizer = with_chat(write_tokenizer(here / "tokenizer", DIGITS))
    finish_a_step(
        "tinker",
        f"model.model={MODEL}",
        f"model.base_url={server.url}",
        f"backend.options.tokenizer={tokenizer}",
        "campaign.stagger_seconds=0",
    )
    assert steps_of(here) == [1, 1]


def test_the_template_for_the_tinker_api_samples_as_the_api_scores(here: Path) -> None:
    CliRunner().invoke(app, ["init", "--template", "tinker"])
    explained = CliRunner().invoke(app, ["explain", "tinker.toml"], env={"TINKER_API_KEY": KEY})
    assert (explained.exit_code, "scores at temperature 1" in explained.output) == (0, False)
