"""A campaign whose launcher is another one when it goes on."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_DONE, EXIT_LAUNCH
from retrain.base.locks import hold
from retrain.campaign.launchers import Begun, Ended
from retrain.campaign.launchers import slurm as plugin
from retrain.config.schema import SlurmSection
from retrain.records.layout import RunFiles
from tests.slurm_pieces import assignment, command, squeue, submitted_before

Retrain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def campaign(retrain: Retrain, campaign_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that was submitted to a Slurm, where its second run waits; from now on it is inline."""
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "queue").touch()
    command(commands, "squeue", 'cat "$(dirname "$0")/queue"')
    for name in ("scontrol", "scancel"):
        command(commands, name, "true")
    path = command(commands, "sbatch", "case $* in *test-only*) ;; *) echo Slurm refuses >&2; exit 1;; esac")
    monkeypatch.setenv("PATH", path)
    done = retrain("run", campaign_file, "--set", "campaign.launcher=slurm")
    assert done.returncode == EXIT_LAUNCH
    (found,) = (tmp_path / "logs").iterdir()
    origin = found / "origin.json"  # as if the file itself had said it
    inline = '"overrides": ["campaign.launcher=inline"]'
    origin.write_text(re.sub(r'"overrides": \[[^]]*\]', inline, origin.read_text()))
    (commands / "queue").write_text(f"7_1|PENDING|{found.name}|None|{found}/slurm/job.sh 0\n")
    return found


def test_runs_that_the_old_cluster_still_has_are_not_begun_beside_it(
    campaign: Path, retrain: Retrain
) -> None:
    done = retrain("resume", campaign)
    assert done.returncode == EXIT_LAUNCH
    second = Path((campaign / "slurm" / "runs.txt").read_text().splitlines()[1]).name
    assert f"slurm still has 1 run of it: {second}. " in done.stderr
    assert f"`retrain stop {campaign}`" in done.stderr
    assert not any(campaign.glob("runs/*/attempts.jsonl"))
    assert '"launcher": "slurm"' in (campaign / "origin.json").read_text()


def test_once_it_has_none_the_campaign_goes_on_here(campaign: Path, retrain: Retrain) -> None:
    (campaign.parent.parent / "commands" / "queue").write_text("")
    assert retrain("resume", campaign).returncode == EXIT_DONE
    assert len(list(campaign.glob("runs/*/done.json"))) == 4


def test_a_cluster_that_cannot_be_asked_is_named_with_the_way_out(
    campaign: Path, retrain: Retrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = retrain("resume", campaign)
    assert done.returncode == EXIT_LAUNCH
    assert "cannot be asked" in done.stderr
    assert f"remove {campaign}/slurm" in done.stderr
    for path in (campaign / "slurm").iterdir():
        path.unlink()
    (campaign / "slurm").rmdir()
    assert retrain("resume", campaign).returncode == EXIT_DONE


def test_workers_that_no_task_stands_for_keep_their_places_and_leave_them_to_the_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = submitted_before(assignment(tmp_path / "camp", 6, workers=3))
    for name in ("sbatch", "scontrol"):
        (tmp_path / f"told {name}").touch()
        command(tmp_path, name, f'echo "$@" >> "{tmp_path}/told {name}"; echo 7')
    tasks = [f"7_{n}|PENDING|camp|None|/nowhere/job.sh 0" for n in range(2, 6)]
    monkeypatch.setenv("PATH", squeue(tmp_path, *tasks))
    launcher = plugin.SlurmLauncher(given, SlurmSection())
    launcher.asking.least_s = 0.0
    locks = []
    for run_id in ("r0", "r1"):
        given.runs[run_id].mkdir(parents=True)
        locks.append(hold(RunFiles(given.runs[run_id]).lock))
    launcher.adopt(["r0", "r1"])
    assert launcher.submit([f"r{n}" for n in range(2, 6)]) == {"r2", "r3", "r4", "r5"}
    assert (tmp_path / "told sbatch").read_text().split()[1] == "--array=2-5%1"
    assert launcher.poll(0) == [Begun("r0"), Begun("r1")]
    assert (tmp_path / "told scontrol").read_text() == "show config\n"
    for lock in locks:
        assert lock is not None
        lock.release()
    ends = [event for _ in range(2) for event in poll(launcher)]
    assert {event.run_id for event in ends if isinstance(event, Ended)} == {"r0", "r1"}
    assert (tmp_path / "told scontrol").read_text() == "show config\nupdate jobid=7 arraytaskthrottle=3\n"


def test_nothing_is_submitted_beside_as_many_workers_as_there_may_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = plugin.SlurmLauncher(
        submitted_before(assignment(tmp_path / "camp", 3, workers=1)), SlurmSection()
    )
    launcher.adopt(["r0"])
    assert launcher.submit(["r1", "r2"]) == set()


def poll(launcher: plugin.SlurmLauncher) -> list[Begun | Ended]:
    launcher.asking.hurry()
    return list(launcher.poll(0))
