"""A campaign goes on the same way from whatever directory it is resumed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_CONFIG, ConfigError
from retrain.campaign.run import reopen, start
from retrain.records.metrics import read_metrics
from tests.conftest import ONE_RUN, TINY

ROOT = Path(__file__).parents[2]
REWARD = """
from pathlib import Path
def score(completion, prompt):
    return float(Path("beside.txt").read_text())
"""
START = """
import sys
from pathlib import Path
from retrain.campaign.run import reopen, start
sys.path.append(str(Path.cwd()))  # as the command does
start(Path(sys.argv[1]), sys.argv[2:])
"""
WITHOUT_DIRECTORY = """
import os, sys
from retrain.trainer.worker import main
os.rmdir(os.getcwd())
sys.exit(main(sys.argv[1:]))
"""
COMMAND_WITHOUT_DIRECTORY = """
import os
import re
import shutil
from retrain.__main__ import main
os.rmdir(os.getcwd())
main()
"""


def python(*arguments: object, where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *map(str, arguments)],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_your_own_reward_is_found_beside_the_campaign_wherever_it_is_resumed(
    campaign_file: Path, here: Path
) -> None:
    (here / "reward_beside_it.py").write_text(REWARD)
    (here / "beside.txt").write_text("0.5")
    with campaign_file.open("a") as file:
        file.write('[reward]\nreward = "reward_beside_it.score"\n')
    python("-c", START, campaign_file, *ONE_RUN, where=here)
    (directory,) = (here / "logs").iterdir()
    resumed = python("-m", "retrain", "resume", directory, where=Path("/"))
    assert resumed.returncode == 0, resumed.stderr


def test_a_worker_whose_current_directory_was_deleted_runs(campaign_file: Path, here: Path) -> None:
    run_dir = start(campaign_file).directory.absolute() / "runs" / "grpo_s0"
    (here / "gone").mkdir()
    ended = python("-c", WITHOUT_DIRECTORY, run_dir, where=here / "gone")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("command", ["stop", "resume"])
def test_a_command_says_that_its_current_directory_was_deleted(
    campaign_file: Path, here: Path, command: str
) -> None:
    directory = start(campaign_file).directory.absolute()
    (here / "gone").mkdir()
    ended = python("-c", COMMAND_WITHOUT_DIRECTORY, command, directory, where=here / "gone")
    last = ended.stderr.splitlines()[-1]
    assert (ended.returncode, last) == (
        EXIT_CONFIG,
        "the current directory was deleted; change to another one",
    )


def test_a_worker_finds_your_own_reward_from_any_directory(campaign_file: Path, here: Path) -> None:
    (here / "reward_beside_it.py").write_text("def score(completion, prompt):\n    return 0.5\n")
    with campaign_file.open("a") as file:
        file.write('[reward]\nreward = "reward_beside_it.score"\n')
    python("-c", START, campaign_file, where=here)
    (run_dir,) = here.glob("logs/*/runs/grpo_s0")
    ended = python("-m", "retrain.trainer.worker", run_dir, where=Path("/"))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("kept", ["the project", "its logs alone"])
def test_a_copied_project_reads_its_own_files_and_copied_logs_the_originals(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{word}", "answer": "b"}}\n' for word in "abcd"))
    Path("tiny.toml").write_text(
        TINY.replace('task = "successor"', 'task = "jsonl"\noptions = {path = "rows.jsonl", held_out = 0}')
    )
    directory = start(Path("tiny.toml")).directory
    copy = tmp_path / "copy"
    shutil.copytree(project, copy)
    if kept == "its logs alone":
        (copy / "rows.jsonl").unlink()
    again = reopen(copy / directory)
    read = {run.config.data.options["path"] for run in again.plan.runs}
    assert read == {str((copy if kept == "the project" else project) / "rows.jsonl")}


def test_a_copied_project_uses_its_own_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, copy = tmp_path / "project", tmp_path / "copy"
    project.mkdir()
    monkeypatch.chdir(project)
    Path("copied_reward.py").write_text("def score(completion, prompt):\n    return 0.5\n")
    Path("tiny.toml").write_text(TINY + '[reward]\nreward = "copied_reward.score"\n')
    directory = start(Path("tiny.toml"), ONE_RUN).directory
    shutil.copytree(project, copy)
    (copy / "copied_reward.py").write_text("def score(completion, prompt):\n    return 0.25\n")
    resumed = python("-m", "retrain", "resume", copy / directory, where=Path("/"))
    assert resumed.returncode == 0, resumed.stderr
    rows = read_metrics(copy / directory / "runs" / "grpo_s0")
    assert {row["mean_reward"] for row in rows} == {0.25}


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The campaign's directory, in a project that was moved and whose file names data by an absolute path."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    rows = project / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{word}", "answer": "b"}}\n' for word in "abcd"))
    options = f'task = "jsonl"\noptions = {{path = "{rows}", held_out = 0}}'
    Path("tiny.toml").write_text(TINY.replace('task = "successor"', options))
    directory = start(Path("tiny.toml")).directory
    monkeypatch.chdir(tmp_path)
    project.rename("moved")
    return tmp_path / "moved" / directory


def test_a_moved_project_resumes_although_its_file_has_absolute_paths(moved: Path) -> None:
    again = reopen(moved)
    read = {run.config.data.options["path"] for run in again.plan.runs}
    assert read == {str(moved.parent.parent / "rows.jsonl")}


def test_an_error_on_resume_names_the_file_to_edit_by_its_whole_path(moved: Path) -> None:
    (moved.parent.parent / "rows.jsonl").unlink()
    with pytest.raises(ConfigError, match=re.escape(f"{moved / 'campaign.toml'} [data.options].path: ")):
        reopen(moved)
