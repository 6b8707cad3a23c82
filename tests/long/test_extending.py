"""The page on extending: its files run as they are shown."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Retrain = Callable[..., subprocess.CompletedProcess[str]]
DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = [(DOCS / name).read_text() for name in ("extending.md", "extending-reference.md")]
FILES = re.findall(
    r"^```(?:python|toml)\n# (\w+\.\w+)\n(.*?)^```", "\n".join(PAGES), re.MULTILINE | re.DOTALL
)
SHOWN = {
    "rewards": "my_rewards.score",
    "advantages": "my_advantages.estimate",
    "transforms": "my_transforms.reweigh",
    "losses": "my_losses.evaluate",
    "tasks": "my_tasks.build",
    "environments": "my_environment.SeveralTries",
    "backends": "my_backend.connect",
    "loggers": "my_loggers.open_logger",
    "launchers": "my_launcher.open_launcher",
    "sandbox": "my_sandbox.open_sandbox",
}


@pytest.fixture
def shown(here: Path) -> Path:
    """A directory with the page's files."""
    for name, text in FILES:
        (here / name).write_text(text)
    return here


@pytest.mark.parametrize("kind", SHOWN)
def test_each_shown_plugin_keeps_its_kinds_contract(kind: str, shown: Path, retrain: Retrain) -> None:
    told = retrain("plugins", kind, "--check", SHOWN[kind])
    assert (told.returncode, "FAILED" in told.stdout) == (0, False), told.stdout + told.stderr


def test_the_shown_reward_of_trls_signature_passes(shown: Path, retrain: Retrain) -> None:
    told = retrain("plugins", "rewards", "--check", "trl_rewards.accuracy")
    assert (told.returncode, "FAILED" in told.stdout) == (0, False), told.stdout + told.stderr


def test_the_shown_campaign_learns_with_every_plugin_of_its_own(shown: Path, retrain: Retrain) -> None:
    text = (shown / "own.toml").read_text()
    assert [name for name in SHOWN.values() if f'"{name}"' not in text] == []
    done = retrain("run", "own.toml", "--set", "campaign.seeds=[0]")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted((shown / "logs").glob("*/runs/*"))
    assert len(runs) == 3
    for run in runs:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        with (run / "rewards.csv").open() as file:
            logged = [(int(step), float(reward)) for step, reward in csv.reader(file)]
        assert logged == [(row["step"], row["mean_reward"]) for row in rows]
        done_file = json.loads((run / "done.json").read_text())
        assert done_file["result"]["eval_correct_rate"] >= 0.75, run.name
