"""One command goes on where a campaign stopped: it runs what is missing and says what it leaves alone."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from retrain.base.errors import ConfigError, LaunchError
from retrain.base.locks import hold
from retrain.campaign import Observer
from retrain.campaign.endings import Ending, conclude, ended_attempts
from retrain.campaign.run import reopen, run_campaign, start
from retrain.plan.matrix import RunPlan
from retrain.records.layout import RunFiles
from retrain.records.manifest import read_manifest
from retrain.records.metrics import read_metrics
from retrain.records.run_state import RunState, begin_attempt, end_attempt, read_attempts
from retrain.results.status import survey
from tests.conftest import ONE_RUN

ROOT = Path(__file__).parents[2]
INLINE = ["campaign.launcher=inline"]
SET_ONE_RUN = [word for setting in ONE_RUN for word in ("--set", setting)]
SET_INLINE = ["--set", *INLINE]


@pytest.fixture(autouse=True)
def _plugins_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT))


class Notes(Observer):
    def __init__(self) -> None:
        self.notices: list[str] = []
        self.begun_runs: list[str] = []

    def started(self, run: RunPlan) -> None:
        self.begun_runs.append(run.run_id)

    def notice(self, text: str) -> None:
        self.notices.append(text)


class DieAfter(Observer):
    """Ends the orchestrator as a kill would, when so many runs have ended."""

    def __init__(self, runs: int) -> None:
        self._left = runs

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


@pytest.fixture
def half(campaign_file: Path) -> Path:
    """A campaign of 4 runs whose orchestrator died after the second."""
    campaign = start(campaign_file, INLINE, DieAfter(2))
    with pytest.raises(KeyboardInterrupt):
        campaign.execute()
    return campaign.directory.absolute()


def test_what_is_finished_is_skipped_and_said_so(half: Path) -> None:
    notes = Notes()
    assert reopen(half, notes).execute().exit_code == 0
    assert len(notes.begun_runs) == 2
    assert notes.notices == ["2 finished runs skipped"]
    attempts = [len(read_attempts(RunFiles(run).attempts)) for run in (half / "runs").iterdir()]
    assert attempts == [1, 1, 1, 1]


def test_a_copied_directory_is_resumed_without_touching_the_original(
    half: Path, here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    before = {path: path.stat().st_mtime_ns for path in half.rglob("*")}
    with hold(half / "campaign.lock") as _:  # type: ignore[union-attr]  # the original goes on meanwhile
        shutil.copytree(half, elsewhere / "copy")
        monkeypatch.chdir(elsewhere)
        assert reopen(Path("copy")).execute().exit_code == 0
    after = {path: path.stat().st_mtime_ns for path in half.rglob("*")}
    del before[half / "campaign.lock"], after[half / "campaign.lock"]
    assert after == before


def test_relative_paths_start_where_the_campaign_began(
    campaign_file: Path, here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f'{{"prompt": "a{number}", "answer": "b"}}\n' for number in range(20)]
    (here / "prompts.jsonl").write_text("".join(lines))
    text = campaign_file.read_text().replace(
        'task = "successor"', 'task = "jsonl"\noptions.path = "prompts.jsonl"'
    )
    campaign_file.write_text(text)
    campaign = start(campaign_file, INLINE, DieAfter(1))
    with pytest.raises(KeyboardInterrupt):
        campaign.execute()
    directory = campaign.directory.absolute()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert reopen(directory).execute().exit_code == 0


def edit(directory: Path, old: str, new: str) -> None:
    path = directory / "campaign.toml"
    path.write_text(path.read_text().replace(old, new))


def test_a_changed_configuration_is_refused_with_what_changed(half: Path) -> None:
    edit(half, "lr = 5e-3", "lr = 6e-3")
    with pytest.raises(
        ConfigError, match=r"training.lr: 0.005 -> 0.006 \(grpo_s0, maxrl_s0, grpo_s1 and 1 more"
    ):
        reopen(half)
    edit(half, "lr = 6e-3", "lr = 5e-3")
    assert reopen(half).execute().exit_code == 0


def test_runs_that_are_new_or_gone_are_changes_too(half: Path) -> None:
    edit(half, "seeds = [0, 1]", "seeds = [0, 2]")
    with pytest.raises(ConfigError) as refused:
        reopen(half)
    assert "run grpo_s2: is new" in str(refused.value)
    assert "run maxrl_s1: is gone" in str(refused.value)


def test_an_accepted_change_goes_on_from_the_checkpoints(half: Path) -> None:
    edit(half, "max_steps = 4", "max_steps = 6")
    outcome = reopen(half, accept_config_change=True).execute()
    assert outcome.exit_code == 0
    for run in (half / "runs").iterdir():
        assert [row["step"] for row in read_metrics(run)] == [1, 2, 3, 4, 5, 6]
        assert read_attempts(RunFiles(run).attempts)[-1].resumed_from_step in (0, 4)
    assert reopen(half).execute().exit_code == 0  # and is how it began from now on


def test_a_change_is_refused_while_workers_run_under_the_old_one(half: Path) -> None:
    edit(half, "lr = 5e-3", "lr = 6e-3")
    lock = hold(half / "runs" / "grpo_s1" / "run.lock")
    assert lock is not None
    with lock, pytest.raises(ConfigError, match=r"changed while grpo_s1 still run.*retrain stop"):
        reopen(half, accept_config_change=True)


def test_how_runs_are_launched_may_change_freely(half: Path) -> None:
    edit(half, "save_every = 2", "save_every = 1")
    edit(half, "max_workers = 2", "max_workers = 1")
    assert reopen(half).execute().exit_code == 0
    assert "save_every = 1" in (half / "runs" / "maxrl_s1" / "run.toml").read_text()


def test_a_start_that_was_killed_half_way_is_completed(campaign_file: Path) -> None:
    text = campaign_file.read_text().replace("seeds = [0, 1]\n", "")  # so that a seed is drawn
    campaign_file.write_text(text)
    directory = start(campaign_file, INLINE).directory
    names = {run.name for run in (directory / "runs").iterdir()}
    shutil.rmtree(directory / "runs" / sorted(names)[0])
    assert reopen(directory).execute().exit_code == 0
    assert {run.name for run in (directory / "runs").iterdir()} == names


def test_a_run_that_cannot_be_read_holds_up_no_other(half: Path) -> None:
    (half / "runs" / "grpo_s0" / "done.json").write_text("{")
    notes = Notes()
    outcome = reopen(half, notes).execute()
    assert outcome.states["grpo_s0"] is RunState.FAILED
    assert sorted(outcome.states.values()).count(RunState.DONE) == 3
    assert any("grpo_s0 is left alone" in said for said in notes.notices)
    assert not any("--failed" in said for said in notes.notices)  # it would fail again
    (half / "runs" / "grpo_s0" / "done.json").unlink()
    assert reopen(half).execute().exit_code == 0


@pytest.mark.parametrize("damage", [b"", b'{"step": 1}\n{"step": 3}\n{"step": 4}\n', b"\0" * 4096])
def test_a_run_whose_rows_are_gone_stops_instead_of_going_on_without_them(damage: bytes, half: Path) -> None:
    run = RunFiles(half / "runs" / "grpo_s0")
    rows = run.metrics.read_bytes()
    run.done.unlink()
    run.metrics.write_bytes(damage)
    assert reopen(half).execute().states["grpo_s0"] is RunState.FAILED
    assert "metrics.jsonl: lacks " in read_attempts(run.attempts)[-1].message
    assert "Traceback" not in run.output_log.read_text()
    run.metrics.write_bytes(rows)
    assert reopen(half).execute(retry_failed=True).states["grpo_s0"] is RunState.DONE
    assert [row["step"] for row in read_metrics(run.directory)] == [1, 2, 3, 4]


def test_the_second_orchestrator_is_told_who_holds_the_campaign(half: Path) -> None:
    with hold(half / "campaign.lock") as _, pytest.raises(LaunchError, match=f"process {os.getpid()}"):  # type: ignore[union-attr]
        reopen(half).execute()


def test_an_earlier_attempts_ending_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    end_attempt(files.attempts, begin_attempt(files.attempts), "interrupted")
    before = ended_attempts(files)
    ending = conclude(files, "hash", -signal.SIGKILL, None, before)  # killed before it wrote a word
    assert ending.state is RunState.INFRASTRUCTURE
    assert [attempt.ending for attempt in read_attempts(files.attempts)] == ["interrupted"]


def test_a_finished_campaign_says_so_and_runs_nothing(campaign_file: Path) -> None:
    directory = run_campaign(campaign_file, INLINE).directory
    before, notes = survey(directory)[0].ended_at, Notes()
    assert reopen(directory, notes).execute().exit_code == 0
    assert (notes.begun_runs, notes.notices) == ([], ["4 finished runs skipped"])
    assert survey(directory)[0].ended_at == before


@pytest.mark.parametrize("damage", ["{broken", "[]", '{"schema_version": 1}', ""])
def test_a_damaged_manifest_is_made_again_from_the_runs(damage: str, campaign_file: Path) -> None:
    directory = run_campaign(campaign_file, INLINE).directory
    (directory / "manifest.json").write_text(damage)
    assert reopen(directory).execute().exit_code == 0
    manifest = read_manifest(directory / "manifest.json")
    assert manifest is not None
    assert [run.state for run in manifest.runs] == ["done"] * 4
    assert (directory / "manifest.json.damaged").read_text() == damage


@pytest.mark.parametrize("lose", [Path.unlink, lambda path: path.write_text("{")], ids=["gone", "damaged"])
def test_without_a_manifest_a_change_is_found_by_the_runs_themselves(
    lose: Callable[[Path], object], half: Path
) -> None:
    lose(half / "manifest.json")
    edit(half, "lr = 5e-3", "lr = 6e-3")
    edit(half, "seeds = [0, 1]", "seeds = [0, 2]")
    with pytest.raises(ConfigError) as refused:
        reopen(half)
    assert "training.lr: 0.005 -> 0.006 (grpo_s0, maxrl_s0)" in str(refused.value)
    assert "run grpo_s2: is new" in str(refused.value)
    assert "run maxrl_s1: is gone" in str(refused.value)
    edit(half, "lr = 6e-3", "lr = 5e-3")
    edit(half, "seeds = [0, 2]", "seeds = [0, 1]")
    assert reopen(half).execute().exit_code == 0


def test_a_single_runs_change_is_found_without_a_manifest(campaign_file: Path) -> None:
    text = campaign_file.read_text().partition("[campaign]")[0]
    campaign_file.write_text(text.replace("save_every = 2", "max_steps = 2"))
    directory = run_campaign(campaign_file).directory
    (directory / "manifest.json").unlink()
    assert reopen(directory).execute().exit_code == 0
    (directory / "manifest.json").unlink()
    edit(directory, "lr = 5e-3", "lr = 6e-3")
    with pytest.raises(ConfigError, match=r"training.lr: 0.005 -> 0.006"):
        reopen(directory)


@pytest.mark.parametrize("end", ["a full disk", "a reader that left"])
def test_messages_that_cannot_be_written_end_no_campaign(end: str, campaign_file: Path, here: Path) -> None:
    command = [sys.executable, "-m", "retrain", "run", campaign_file.name, *SET_ONE_RUN, *SET_INLINE]
    if end == "a full disk":
        with Path("/dev/full").open("wb") as full:
            code = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=full).returncode
    else:
        reading, writing = os.pipe()
        os.close(reading)
        code = subprocess.run(command, stdout=writing, stderr=writing).returncode
        os.close(writing)
    (directory,) = (here / "logs").iterdir()
    states = [RunFiles(run).done.exists() for run in (directory / "runs").iterdir()]
    assert (code, states) == (0, [True])


NO_STREAMS = "<&- >&- 2>&-"


@pytest.mark.parametrize("closed", [">&-", "2>&-", NO_STREAMS, ">/dev/full"])
def test_a_campaign_does_not_need_its_standard_streams(closed: str, campaign_file: Path, here: Path) -> None:
    where = SET_INLINE if closed != NO_STREAMS else []
    command = shlex.join([sys.executable, "-m", "retrain", "run", campaign_file.name, *SET_ONE_RUN, *where])
    done = subprocess.run(["bash", "-c", f"{command} {closed}"], capture_output=True, text=True)
    (directory,) = (here / "logs").iterdir()
    states = [RunFiles(run).done.exists() for run in (directory / "runs").iterdir()]
    assert (done.returncode, states) == (0, [True]), done.stderr
    assert ("could not be shown (No space left on device)" in done.stderr) == (closed == ">/dev/full")


def test_a_worker_without_standard_streams_says_that_it_is_done(campaign_file: Path) -> None:
    directory = start(campaign_file).directory
    command = f'exec "{sys.executable}" -m retrain.trainer.worker {directory}/runs/grpo_s0 <&- >&- 2>&-'
    assert (
        subprocess.run(["bash", "-c", command], env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0
    )
