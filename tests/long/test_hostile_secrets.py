"""A key in the environment stays there: no file of a campaign holds it, whatever ends how."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CANARY = "canary-7d1f63a9c2"
KEYS = (
    "OPENAI_API_KEY",
    "TINKER_API_KEY",
    "ANTHROPIC_API_KEY",
    "HF_TOKEN",
    "AWS_SECRET_ACCESS_KEY",
    "PASSWORD",
)
Call = Callable[..., subprocess.CompletedProcess[str]]


def run_with_secrets(retrain: Call, *arguments: object) -> subprocess.CompletedProcess[str]:
    secrets = dict.fromkeys(KEYS, CANARY)
    return retrain(*arguments, env={**os.environ, **secrets, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize("reward", ["always_right", "broken", "unreachable", "quoting", "quoting_unscored"])
def test_no_file_and_no_output_of_a_campaign_holds_a_key_from_the_environment(
    reward: str, retrain: Call, campaign_file: Path, here: Path
) -> None:
    sets = ["--set", f"reward.reward=tests.plugins.{reward}", "--set", "campaign.seeds=[0]"]
    sets += ["--set", "campaign.retries=0"]
    ran = run_with_secrets(retrain, "--debug", "run", campaign_file.name, *sets)
    (campaign,) = (here / "logs").iterdir()
    assert ("401" in (campaign / "runs/grpo_s0/output.log").read_text()) == reward.startswith("quoting")
    shown = run_with_secrets(retrain, "status", campaign, "--json")
    logged = run_with_secrets(retrain, "logs", campaign, "grpo_s0")
    exported = run_with_secrets(retrain, "export", campaign)
    for answer in (ran, shown, logged, exported):
        assert CANARY not in answer.stdout + answer.stderr
    files = [path for path in campaign.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
