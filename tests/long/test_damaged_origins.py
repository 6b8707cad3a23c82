"""A campaign goes on as it was planned, whatever was edited, damaged, moved or deleted of its records."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_CONFIG, ConfigError, RecordsError
from retrain.campaign import Observer
from retrain.campaign.endings import Ending
from retrain.campaign.run import reopen, start
from retrain.control.semaphore import FileSemaphore
from retrain.plan.matrix import RunPlan
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.provenance import known_origin
from retrain.records.run_state import read_attempts
from retrain.results.report.gather import gather
from retrain.trainer import worker
from tests.conftest import ONE_RUN

Call = Callable[..., subprocess.CompletedProcess[str]]
SET = ["campaign.launcher=inline", "training.temperature=0.5"]
SINGLE = '[training]\nlr = 5e-3\nmax_steps = 3\nbatch_size = 2\ngroup_size = 4\n[data]\ntask = "successor"\n'


class Notes(Observer):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


class DieAfterOne(Observer):
    """Ends the orchestrator as a kill would, when a run has ended."""

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def begun(campaign_file: Path) -> Path:
    """A campaign of 4 runs whose orchestrator died after the first."""
    campaign = start(campaign_file, SET, DieAfterOne())
    with pytest.raises(KeyboardInterrupt):
        campaign.execute()
    return campaign.directory.absolute()


def edit(path: Path, pattern: str, replacement: str) -> str:
    before = path.read_text()
    after = re.sub(pattern, replacement, before, flags=re.MULTILINE)
    assert after != before
    path.write_text(after)
    return before


def learning_rates(directory: Path) -> set[float]:
    return {row["lr"] for path in (directory / "runs").iterdir() for row in read_metrics(path)}


def test_a_file_that_is_edited_while_it_is_checked_is_kept_as_it_was_read(campaign_file: Path) -> None:
    content = campaign_file.read_bytes()
    edited = "from pathlib import Path\nfile = Path('tiny.toml')\nfile.write_text(file.read_text() + '#')\n"
    (campaign_file.parent / "editing.py").write_text(f"{edited}def score(completion, prompt): return 0.5\n")
    campaign = start(campaign_file, ["reward.reward=editing.score", "campaign.launcher=inline"])
    assert campaign_file.read_bytes() == content + b"#"
    assert (campaign.directory / "campaign.toml").read_bytes() == content


def test_an_edit_while_a_campaign_is_resumed_is_told_by_the_next_resume(
    campaign_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, score = campaign_file.parent / "edits.py", "def score(completion, prompt): return 0.5\n"
    module.write_text(score)
    campaign = start(campaign_file, ["reward.reward=edits.score", "campaign.launcher=inline"], DieAfterOne())
    with pytest.raises(KeyboardInterrupt):
        campaign.execute()
    file = campaign.directory.absolute() / "campaign.toml"
    edited = f"from pathlib import Path\nfile = Path({str(file)!r})\n"
    edited += "file.write_text(file.read_text().replace('lr = 5e-3', 'lr = 1e-3'))\n"
    module.write_text(edited + score)
    monkeypatch.delitem(sys.modules, "edits")
    with pytest.raises(KeyboardInterrupt):
        reopen(campaign.directory, DieAfterOne()).execute()  # planned from the file as it was
    assert "lr = 1e-3" in file.read_text()
    with pytest.raises(ConfigError, match=r"results would differ(.|\n)*training.lr: 0.005 -> 0.001"):
        reopen(campaign.directory)


def test_an_edited_run_is_written_again_and_not_obeyed(begun: Path) -> None:
    path, notes = begun / "runs" / "maxrl_s1" / "run.toml", Notes()
    before = edit(path, "^lr = .*", "lr = 0.09")
    assert reopen(begun, notes).execute().exit_code == 0
    assert path.read_text() == before
    assert learning_rates(begun) == {5e-3}
    assert [text for text in notes.notices if "maxrl_s1" in text and "rewritten from campaign.toml" in text]


def test_a_worker_refuses_an_edited_run_before_it_begins(
    begun: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = RunFiles(begun / "runs" / "maxrl_s1")
    edit(files.run_toml, "^lr = .*", "lr = 0.09")
    assert worker.run(files.directory, threading.Event()) == EXIT_CONFIG
    assert "was changed since it was planned; `retrain resume" in capfd.readouterr().err
    assert read_attempts(files.attempts) == ()


def test_an_edited_run_is_named_and_not_shown(begun: Path) -> None:
    edit(begun / "runs" / "maxrl_s1" / "run.toml", "^lr = .*", "lr = 0.09")
    found = gather(begun)
    assert [problem for problem in found.problems if problem.startswith("maxrl_s1: run.toml was changed")]
    assert [run.run_id for run in found.runs if not run.config] == ["maxrl_s1"]


def test_an_edited_single_run_is_not_obeyed(here: Path) -> None:
    file = here / "one.toml"
    file.write_text(SINGLE)
    directory = start(file).directory.absolute()
    edit(directory / "run.toml", "^lr = .*", "lr = 0.09")
    assert worker.run(directory, threading.Event()) == EXIT_CONFIG
    assert reopen(directory).execute().exit_code == 0
    assert {row["lr"] for row in read_metrics(directory)} == {5e-3}


@pytest.mark.parametrize("content", [None, "", "{}", '{"name": 1', "[1]"])
def test_a_lost_origin_is_made_again_from_the_runs(begun: Path, content: str | None) -> None:
    path, notes = begun / "origin.json", Notes()
    before = json.loads(path.read_text())
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert reopen(begun, notes).execute().exit_code == 0
    after = json.loads(path.read_text())
    assert after == before
    lost = "missing" if content is None else "damaged"
    assert f"{path}: is {lost}; it is rebuilt from the runs" in notes.notices


@pytest.mark.parametrize("table", ["launcher_options", '"mine.open"'])
def test_a_lost_origin_has_the_options_of_a_launcher_wherever_they_are_written(
    tmp_path: Path, table: str
) -> None:
    files = CampaignFiles(tmp_path)
    files.campaign_toml.write_text(f'[campaign]\nlauncher = "mine.open"\n[campaign.{table}]\nniceness = 5\n')
    assert known_origin(files)[0].options == {"niceness": 5}


def test_an_origin_that_cannot_be_read_for_now_is_kept(begun: Path) -> None:
    path, kept = begun / "origin.json", begun / "kept.json"
    path.rename(kept)
    path.symlink_to("/proc/self/mem")  # which begins with an input/output error
    with pytest.raises(RecordsError, match=r"origin\.json"):
        reopen(begun)
    kept.replace(path)
    assert reopen(begun).execute().exit_code == 0


def test_what_an_orchestrator_left_that_was_killed_is_removed_from_runs_that_do_not_start(
    begun: Path,
) -> None:
    run = begun / "runs" / "grpo_s0"
    (run / "run.toml").rename(run / ".run.toml.1-0a1b2c3d.tmp")
    reopen(begun).catch_up()
    assert [path.name for path in run.glob("*run.toml*")] == ["run.toml"]


@pytest.mark.parametrize("content", [None, "", "{", '{"permits": 0, "slots": 0}'])
def test_a_lost_number_of_permits_is_set_again(begun: Path, content: str | None) -> None:
    path = begun / "permits" / "permits.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert reopen(begun).execute().exit_code == 0
    assert FileSemaphore.inspect(begun / "permits").permits == 4


def with_prompts(campaign_file: Path) -> Path:
    """A campaign on prompts and held-out prompts of one's own, whose orchestrator died after a run."""
    for name in "ab":
        lines = [f'{{"prompt": "{name}{number}", "answer": "b"}}\n' for number in range(20)]
        (campaign_file.parent / f"{name}.jsonl").write_text("".join(lines))
    options = 'task = "jsonl"\noptions.path = "a.jsonl"\noptions.held_out_path = "b.jsonl"'
    campaign_file.write_text(campaign_file.read_text().replace('task = "successor"', options))
    campaign = start(campaign_file, SET, DieAfterOne())
    with pytest.raises(KeyboardInterrupt):
        campaign.execute()
    return campaign.directory.absolute()


def test_a_project_that_was_moved_is_the_same_experiment(
    campaign_file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = with_prompts(campaign_file)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    moved = Path(shutil.move(campaign_file.parent, elsewhere / "project"))
    assert reopen(moved / "logs" / directory.name).execute().exit_code == 0
    assert len(list(moved.glob("logs/*/runs/*/done.json"))) == 4


def test_a_campaign_that_was_moved_without_its_project_finds_it_in_the_current_directory(
    campaign_file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = with_prompts(campaign_file)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    moved = shutil.move(directory, elsewhere / "a" / "b" / "copy")
    monkeypatch.chdir(shutil.move(campaign_file.parent, elsewhere / "project"))
    assert reopen(Path(moved)).execute().exit_code == 0


def test_a_campaign_and_its_project_that_moved_apart_find_each_other_by_a_plugin(
    campaign_file: Path, tmp_path_factory: pytest.TempPathFactory, retrain: Call
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    leaves_a_trace = "from pathlib import Path\ndef score(completion, prompt):\n    Path('seen').touch()\n"
    (campaign_file.parent / "my_scores.py").write_text(f"{leaves_a_trace}    return 0.5\n")
    sets = [word for one in (*ONE_RUN, "reward.reward=my_scores.score") for word in ("--set", one)]
    assert retrain("run", campaign_file.name, *sets).returncode == 0
    (directory,) = campaign_file.parent.glob("logs/*")
    run = RunFiles(directory / "runs" / "grpo_s0")
    shutil.rmtree(run.checkpoints)
    for path in (run.metrics, run.done):
        path.unlink()
    moved = shutil.move(directory, elsewhere / "a" / "b" / "copy")
    project = Path(shutil.move(campaign_file.parent, elsewhere / "project"))
    (project / "seen").unlink()
    again = retrain("resume", moved, cwd=project)
    assert (again.returncode, (project / "seen").exists()) == (0, True), again.stderr


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl"])
def test_changed_prompts_are_another_experiment(campaign_file: Path, name: str) -> None:
    directory = with_prompts(campaign_file)
    edit(campaign_file.parent / name, '7"', '77"')
    with pytest.raises(ConfigError, match=rf"path: .*{name} has changed since"):
        reopen(directory)
    assert worker.run(directory / "runs" / "maxrl_s1", threading.Event()) == EXIT_CONFIG
    assert reopen(directory, accept_config_change=True).execute().exit_code == 0


def test_only_the_changed_prompts_of_a_moved_project_are_named(
    campaign_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    directory = with_prompts(campaign_file)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    moved = Path(shutil.move(campaign_file.parent, elsewhere / "project"))
    campaign = moved / "logs" / directory.name
    assert worker.run(campaign / "runs" / "maxrl_s1", threading.Event()) == EXIT_CONFIG
    assert f"the file is missing; restore it; `retrain resume {campaign}` finds" in capfd.readouterr().err
    edit(moved / "a.jsonl", '7"', '77"')
    with pytest.raises(ConfigError) as refused:
        reopen(campaign)
    assert "a.jsonl has changed since" in str(refused.value)
    assert "b.jsonl" not in str(refused.value)
    assert " -> " not in str(refused.value)


def test_a_worker_finds_its_files_from_any_directory(
    campaign_file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = with_prompts(campaign_file)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert worker.run(directory / "runs" / "maxrl_s1", threading.Event()) == 0
