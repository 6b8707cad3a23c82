"""One file, one result: the directory, the number of workers and evaluation change nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_done
from tests.conftest import LIMIT_S
from tests.warm import WarmCommandLine

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
{where}

[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"

[[campaign.conditions]]
name = "sepa"
transform_mode = "gtpo_sepa"
"""
CLOCKS = ("_s", "_per_second", "timestamp")  # endings of what a clock decides
EVALUATION = "eval_"  # how keys of an evaluation begin
Values = dict[str, object]


@dataclass(frozen=True)
class Recorded:
    """What a run recorded, except for what a clock decides."""

    rows: list[Values]
    result: Values

    def unevaluated(self) -> Recorded:
        """Return what is left without evaluations."""
        return Recorded([_without_evaluation(row) for row in self.rows], _without_evaluation(self.result))


def _without_evaluation(values: Values) -> Values:
    return {key: value for key, value in values.items() if not key.startswith(EVALUATION)}


def _without_times(values: Mapping[str, object]) -> Values:
    return {key: value for key, value in values.items() if not key.endswith(CLOCKS)}


HERE = 'launcher = "inline"'  # in one process, instead of one for each run
FOUR_WORKERS = "parallel = true\nmax_workers = 4"


def record(
    warm: WarmCommandLine, project: Path, *, where: str = HERE, training: str = "", data: str = ""
) -> dict[str, Recorded]:
    """Run the file in a directory of its own, and return what each run recorded."""
    project.mkdir(parents=True)
    prompts = [{"prompt": f"{a}{b}", "answer": f"{b}{a}"} for a in "abcd" for b in "abcd"]
    (project / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (project / "c.toml").write_text(FILE.format(where=where, training=training, data=data))
    ended = warm.run(["run", "c.toml"], project, None, timeout_s=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    (campaign,) = (project / "logs").iterdir()
    recorded = {}
    for run in (campaign / "runs").iterdir():
        done = read_done(run / "done.json")
        assert done is not None
        rows = [_without_times(row) for row in read_metrics(run)]
        recorded[run.name] = Recorded(rows, _without_times(done.result))
    return recorded


@pytest.fixture(scope="module")
def alone(warm: WarmCommandLine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    """In one process, no evaluation before the end."""
    return record(warm, tmp_path_factory.mktemp("first") / "project")


def test_runs_differ_from_each_other(alone: dict[str, Recorded]) -> None:
    runs = [[{**row, "run": "", "condition": "", "seed": 0} for row in run.rows] for run in alone.values()]
    assert [len(rows) for rows in runs] == [5] * 4
    assert all(one != other for number, one in enumerate(runs) for other in runs[:number])
    assert all("eval_reward" in run.result for run in alone.values())


@pytest.mark.parametrize(
    "changed", [{}, {"where": FOUR_WORKERS}], ids=["in another directory", "four workers"]
)
def test_records_are_identical(
    alone: dict[str, Recorded], changed: dict, warm: WarmCommandLine, tmp_path: Path
) -> None:
    assert record(warm, tmp_path / "somewhere" / "else", **changed) == alone


def test_evaluation_changes_nothing_else(
    alone: dict[str, Recorded], warm: WarmCommandLine, tmp_path: Path
) -> None:
    evaluated = record(warm, tmp_path / "project", training="eval_every = 1", data="eval_samples = 3")
    assert {name: run.unevaluated() for name, run in evaluated.items()} == {
        name: run.unevaluated() for name, run in alone.items()
    }
