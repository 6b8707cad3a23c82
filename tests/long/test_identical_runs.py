"""One file, one result: the directory, the number of workers and evaluation change nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.records.metrics import read_metrics

FILE = """
[training]
batch_size = 3
group_size = 4
max_tokens = 4
temperature = 1.0
lr = 5e-3
{training}

[reward]
reward = "partial"

[data]
task = "jsonl"
{data}

[data.options]
path = "prompts.jsonl"
held_out = 0.3

[campaign]
seeds = [0, 1]
max_steps = 5
parallel = true
max_workers = {workers}

[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"

[[campaign.conditions]]
name = "sepa"
transform_mode = "gtpo_sepa"
"""
CLOCKS = ("_s", "_per_second", "timestamp")  # endings of what a clock decides


def rows_of(
    project: Path, *, workers: int = 1, training: str = "", data: str = ""
) -> dict[str, list[dict[str, object]]]:
    """Run the file in a directory of its own, and return the rows of each run."""
    project.mkdir(parents=True)
    prompts = [{"prompt": f"{a}{b}", "answer": f"{b}{a}"} for a in "abcd" for b in "abcd"]
    (project / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (project / "c.toml").write_text(FILE.format(workers=workers, training=training, data=data))
    command = [sys.executable, "-m", "retrain", "run", "c.toml"]
    ended = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    (campaign,) = (project / "logs").iterdir()
    return {
        run.name: [
            {
                key: value
                for key, value in row.items()
                if not key.endswith(CLOCKS) and not key.startswith("eval_")
            }
            for row in read_metrics(run)
        ]
        for run in (campaign / "runs").iterdir()
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    """One worker, no evaluation before the end."""
    return rows_of(tmp_path_factory.mktemp("first") / "project")


def test_runs_differ_from_each_other(alone: dict[str, list[dict[str, object]]]) -> None:
    runs = [[{**row, "run": "", "condition": "", "seed": 0} for row in rows] for rows in alone.values()]
    assert [len(rows) for rows in runs] == [5] * 4
    assert all(one != other for number, one in enumerate(runs) for other in runs[:number])


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"workers": 4},
        {"training": "eval_every = 1", "data": "eval_samples = 3"},
    ],
    ids=["in another directory", "four workers", "evaluated after every step"],
)
def test_rows_are_identical(alone: dict[str, list[dict[str, object]]], changed: dict, tmp_path: Path) -> None:
    assert rows_of(tmp_path / "somewhere" / "else", **changed) == alone
