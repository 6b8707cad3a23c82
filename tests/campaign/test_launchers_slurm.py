"""What the Slurm launcher writes and reads, without a Slurm; tests/cluster has a real one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.backends import Devices
from retrain.base.errors import EXIT_CONFIG, EXIT_LAUNCH
from retrain.base.locks import hold
from retrain.campaign.launchers import Assignment, Begun, Ended
from retrain.campaign.launchers import slurm as plugin
from retrain.campaign.launchers.cluster import SubmittedRun
from retrain.campaign.launchers.shared_permits import workers_at_a_time
from retrain.campaign.launchers.slurm import is_script, newest_by_run, news_of, render
from retrain.campaign.launchers.slurm.commands import SlurmTask, array_of, held_back, parse
from retrain.campaign.run import start
from retrain.config.schema import SlurmSection
from retrain.records.campaign_state import asked_to_stop
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.run_state import write_done
from tests.slurm_pieces import assignment, expand, squeue, submitted_before

Retrain = Callable[..., subprocess.CompletedProcess[str]]


def task(job: int, index: int | None, state: str = "RUNNING", first: int = 0) -> SlurmTask:
    return SlurmTask(job, index, state, "camp", "None", f"/nowhere/job.sh {first}")


@given(st.sets(st.integers(0, 3000)))
def test_an_array_names_exactly_its_indices(indices: set[int]) -> None:
    assert expand(array_of(indices)) == indices


def test_indices_in_a_row_are_a_range() -> None:
    assert array_of([5, 0, 1, 2, 9, 8]) == "0-2,5,8-9"


def test_squeue_lines_are_read_and_others_passed_over() -> None:
    lines = ["17_3|PENDING|camp|JobArrayTaskLimit|/a b/job.sh 20", "an error", "18|CANCELLED|camp|None|x|y"]
    assert parse("\n".join(lines)) == [
        SlurmTask(17, 3, "PENDING", "camp", "JobArrayTaskLimit", "/a b/job.sh 20"),
        SlurmTask(18, None, "CANCELLED", "camp", "None", "x|y"),
    ]


def test_the_newest_task_of_a_run_counts() -> None:
    tasks = [task(9, 1), task(7, 1, "FAILED"), task(7, 0), task(8, None, "CANCELLED")]
    newest = newest_by_run([*tasks, task(6, 1, first=20)])
    assert {number: found.job for number, found in newest.items()} == {0: 7, 1: 9, 21: 6}


def test_a_waiting_task_that_is_missing_from_its_job_was_cancelled(files: RunFiles) -> None:
    files.run_toml.touch()
    earlier = task(6, 0, "FAILED")
    (ended,) = news_of(SubmittedRun("r", files, 8), earlier, jobs={8})
    assert isinstance(ended, Ended)
    assert ended.taken_back
    assert news_of(SubmittedRun("r", files, 7), task(7, 0), jobs={7, 8}) == [Begun("r")]
    assert news_of(SubmittedRun("r", files, 7), None, jobs={8}) == []  # the whole job is missing


def test_a_task_that_started_and_is_missing_from_its_job_was_not_cancelled(files: RunFiles) -> None:
    watch = SubmittedRun("r", files, 8)
    (files.directory / "engine-8_0.out").touch()
    assert news_of(watch, None, jobs={8}) == []
    (ended,) = news_of(watch, None, jobs={8})
    assert isinstance(ended, Ended)
    assert (ended.taken_back, ended.is_lost) == (False, True)


def test_jobs_of_a_copied_campaign_are_not_taken_for_ours(tmp_path: Path) -> None:
    ours, copy = tmp_path / "ours.sh", tmp_path / "copy.sh"
    ours.touch()
    copy.touch()
    (tmp_path / "link").symlink_to(tmp_path)
    of = lambda path, more=" 12": replace(task(1, 0), script=f"{path}{more}")  # noqa: E731
    assert is_script(of(ours), ours)
    assert is_script(of(tmp_path / "link" / "ours.sh"), ours)
    assert is_script(of("/mounted/elsewhere/ours.sh"), ours)
    assert not is_script(of(copy), ours)
    assert not is_script(of(copy, more=""), ours)


def test_only_reasons_that_waiting_may_not_cure_are_told() -> None:
    waiting = [
        replace(task(1, n, "PENDING"), reason=reason)
        for n, reason in enumerate(["Resources", "JobHeldUser", "JobHeldUser", "PartitionTimeLimit"])
    ]
    assert held_back([*waiting, task(1, 9)]) == {"JobHeldUser": 2, "PartitionTimeLimit": 1}


# Which run has which number


def running(*indices: int) -> list[str]:
    return [f"7_{index}|RUNNING|camp|None|/nowhere/job.sh 0" for index in indices]


def submitted(given: Assignment) -> Assignment:
    plugin.SlurmLauncher(submitted_before(given), SlurmSection()).submit([])
    return given


def test_who_stops_a_campaign_finds_the_runs_of_its_tasks_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = submitted(assignment(tmp_path / "camp", 12))
    in_order_of_names = replace(given, runs=dict(sorted(given.runs.items())))
    launcher = plugin.SlurmLauncher(in_order_of_names, SlurmSection())
    monkeypatch.setenv("PATH", squeue(tmp_path, *running(2, 10)))
    assert launcher.queued() == {"r2", "r10"}


def test_runs_keep_their_numbers_when_others_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = submitted(assignment(tmp_path / "camp", 3))
    runs = {"new": tmp_path / "camp/runs/new", "r2": given.runs["r2"], "r0": given.runs["r0"]}
    launcher = plugin.SlurmLauncher(submitted(replace(given, runs=runs)), SlurmSection())
    monkeypatch.setenv("PATH", squeue(tmp_path, *running(1, 2, 3)))
    assert launcher.queued() == {"r2", "new"}
    listed = (tmp_path / "camp/slurm/runs.txt").read_text().splitlines()
    assert [Path(line).name for line in listed] == ["r0", "r1", "r2", "new"]


def test_a_moved_campaign_lists_its_runs_where_they_are(tmp_path: Path) -> None:
    submitted(assignment(tmp_path / "camp", 2))
    (tmp_path / "camp").rename(tmp_path / "moved")
    moved = submitted(assignment(tmp_path / "moved", 2))
    assert (tmp_path / "moved/slurm/runs.txt").read_text() == "".join(f"{p}\n" for p in moved.runs.values())


# One run in Slurm's hands


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path)


def test_a_task_that_slurm_forgot_is_looked_for_twice(files: RunFiles) -> None:
    watch = SubmittedRun("r", files, 7)
    assert news_of(watch, None) == []
    assert news_of(watch, None) == [
        Ended("r", None, "Slurm no longer knows task 7 of the run", cut_short=True, is_lost=True)
    ]


def test_a_completed_task_waits_for_its_files(files: RunFiles) -> None:
    watch, over = SubmittedRun("r", files, 7), task(7, 0, "COMPLETED")
    assert news_of(watch, over) == []
    files.done.touch()
    assert [type(event).__name__ for event in news_of(watch, over)] == ["Begun", "Ended"]


def test_a_file_server_that_is_unreachable_for_a_while_ends_no_watch(tmp_path: Path) -> None:
    unreachable = RunFiles(tmp_path / ("x" * 300))  # an error of the file system
    assert news_of(SubmittedRun("r", unreachable, 7), task(7, 0, "COMPLETED")) == []
    assert news_of(SubmittedRun("r", unreachable, 7), None, jobs={7}) == []
    assert isinstance(news_of(SubmittedRun("r", unreachable, 7), task(7, 0, "FAILED"))[-1], Ended)


def test_a_finished_run_is_done_whatever_slurm_still_says(files: RunFiles) -> None:
    watch = SubmittedRun("r", files, 7)
    files.run_toml.write_text('[run]\nconfig_hash = "v2:ab"\n')
    write_done(files.done, "another", {})
    assert watch.finished() == []
    write_done(files.done, "v2:ab", {})
    lock = hold(files.lock)
    assert lock is not None
    with lock:
        assert watch.finished() == []
    assert watch.finished() == [Begun("r"), Ended("r", 0)]


def test_the_end_of_an_earlier_job_says_nothing(files: RunFiles) -> None:
    assert news_of(SubmittedRun("r", files, 8), task(7, 0, "FAILED")) == []


@pytest.mark.parametrize(
    ("state", "cut_short"), [("TIMEOUT", True), ("NODE_FAIL", True), ("CANCELLED", False)]
)
def test_what_slurm_ended_goes_on_unless_somebody_cancelled_it(
    state: str, cut_short: bool, files: RunFiles
) -> None:
    ended = news_of(SubmittedRun("r", files, 7), task(7, 0, state))[-1]
    assert isinstance(ended, Ended)
    assert (ended.cut_short, ended.taken_back) == (cut_short, not cut_short)
    assert ended.is_lost is (state == "NODE_FAIL")


# The script


def test_the_script_says_all_that_was_asked_for(tmp_path: Path) -> None:
    table = SlurmSection(
        partition="gpu", time="4:00:00", mem="8G", gres="gpu:1", cpus=3, licence="tinker:1", account="me"
    )
    text = render(assignment(tmp_path), replace(table, flags=["--qos=long"], setup=["module load python"]))
    for flag in (
        "--partition=gpu --time=4:00:00 --mem=8G --gres=gpu:1 --cpus-per-task=3 --licenses=tinker:1 "
        "--account=me --qos=long --signal=B:TERM@60 --no-requeue"
    ).split():
        assert f"\n#SBATCH {flag}\n" in text
    assert text.index("module load python") < text.index("\nexec /")
    assert text.splitlines()[-1].startswith("exec ")


def test_a_job_has_a_core_for_each_device_and_gpus_that_the_table_leaves_out(
    tmp_path: Path,
) -> None:
    devices = Devices(cores=4, gpus=4)
    plain = render(assignment(tmp_path, devices=devices), SlurmSection(cpus=2))
    assert "\n#SBATCH --gpus-per-node=4\n#SBATCH --cpus-per-task=4\n" in plain
    for table in (SlurmSection(gres="gpu:a100:4", cpus=8), SlurmSection(flags=["--gpus=4"], cpus=8)):
        text = render(assignment(tmp_path, devices=devices), table)
        assert ("--gpus-per-node" in text, "--cpus-per-task=8\n" in text) == (False, True)
    text = render(assignment(tmp_path, devices=Devices(nodes=2)), SlurmSection())
    assert "\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n" in text


@pytest.mark.parametrize("name", ["plain", "two words", "it's", "$(touch hacked)", "a;b", "100%"])
def test_a_task_runs_its_own_run_whatever_the_directory_is_called(name: str, tmp_path: Path) -> None:
    given = assignment(tmp_path / name, where=tmp_path)
    for run_id, directory in given.runs.items():
        directory.mkdir(parents=True)
        (directory / "run.toml").write_text(run_id)
    home = given.directory / "slurm"
    home.mkdir()
    (home / "runs.txt").write_text("".join(f"{path}\n" for path in given.runs.values()))
    (home / "task-5_1.out").touch()
    (home / "job.sh").write_text(render(given, SlurmSection(python="echo", setup=['echo "$RETRAIN_JOB"'])))
    task_of = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", str(home / "job.sh"), "1"], env=task_of, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    said = (given.runs["r2"] / "output.log").read_text()
    assert said == f"slurm 5_1\n-P -m retrain.trainer.worker {given.runs['r2']}\n"
    assert (given.runs["r2"] / "engine-5_1.out").exists()
    assert not (tmp_path / "hacked").exists()


def test_split_permits_are_what_the_cap_leaves_each_run(tmp_path: Path) -> None:
    few, many = assignment(tmp_path, 8, permits=4), assignment(tmp_path, 3, permits=7)
    assert (workers_at_a_time(few, "split"), workers_at_a_time(many, "split")) == (4, 3)
    assert "RETRAIN_OWN_PERMITS=1\n" in render(few, SlurmSection())
    assert "RETRAIN_OWN_PERMITS=2\n" in render(many, SlurmSection())


def test_shared_permits_and_backends_without_leave_the_cap_alone(tmp_path: Path) -> None:
    shared = SlurmSection(permits="shared")
    assert workers_at_a_time(assignment(tmp_path, 8, permits=4), "shared") == 8
    assert "RETRAIN_OWN_PERMITS" not in render(assignment(tmp_path, 8, permits=4), shared)
    assert workers_at_a_time(assignment(tmp_path, 8), "split") == 8


def test_sharing_permits_with_other_campaigns_asks_for_proof(tmp_path: Path) -> None:
    sharing = assignment(tmp_path, permit_directories=(tmp_path,))
    assert "[backend].throttle_dir" in plugin.check_campaign(sharing)[0]
    assert plugin.check_campaign(replace(sharing, options={"permits": "shared"})) == []


# On a machine without Slurm


def test_without_slurm_nothing_is_created_and_the_user_told(
    retrain: Retrain, campaign_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = retrain("run", campaign_file, "--set", "campaign.launcher=slurm")
    assert done.returncode == EXIT_LAUNCH
    assert "sbatch, squeue, scancel, scontrol: not found" in done.stderr
    assert not (campaign_file.parent / "logs").exists()


def test_a_stop_where_the_cluster_is_not_says_what_holds_anyway(
    retrain: Retrain, campaign_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = start(campaign_file, ["campaign.launcher=local"]).directory
    origin = campaign / "origin.json"
    origin.write_text(origin.read_text().replace('"local"', '"slurm"'))
    monkeypatch.setenv("PATH", "/nowhere")
    done = retrain("stop", campaign)
    assert done.returncode == EXIT_LAUNCH
    assert "not found" in done.stderr
    assert "runs that have not started will not" in done.stderr
    assert asked_to_stop(CampaignFiles(campaign))


def test_explain_shows_the_script_anywhere(retrain: Retrain, campaign_file: Path) -> None:
    done = retrain(
        "explain", campaign_file, "--set", "campaign.launcher=slurm", "--set", "campaign.slurm.mem=2G"
    )
    assert done.returncode == 0, done.stderr
    assert "    #SBATCH --mem=2G\n" in done.stdout


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("partitoin = 'gpu'", "[campaign.slurm].partitoin: unknown key; did you mean 'partition'?"),
        ("flags = 'x'", '[campaign.slurm].flags: got "x"; needs a list in [brackets]'),
        ("flags = [1]", "needs a string in quotes"),
        ("poll_seconds = 0.5", "[campaign.slurm].poll_seconds: got 0.5; needs at least 2"),
        ('setup = ["""a\nb"""]', "[campaign.slurm].setup: 'a\\nb' has more than one line"),
        ('flags = ["--x\\ry"]', "[campaign.slurm].flags: '--x\\ry' has more than one line"),
        ('partition = "gpu\\nrm x"', "[campaign.slurm].partition: 'gpu\\nrm x' has more than one line"),
        ('licence = "a:1\\nrm x"', "[campaign.slurm].licence: 'a:1\\nrm x' has more than one line"),
    ],
)
def test_wrong_keys_are_named(line: str, problem: str, retrain: Retrain, campaign_file: Path) -> None:
    slurm = f'launcher = "slurm"\n[campaign.slurm]\n{line}\n[[campaign.conditions]]'
    campaign_file.write_text(campaign_file.read_text().replace("[[campaign.conditions]]", slurm, 1))
    done = retrain("explain", campaign_file)
    assert done.returncode == EXIT_CONFIG
    assert problem in done.stderr
