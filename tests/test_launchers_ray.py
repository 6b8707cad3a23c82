"""What the Ray launcher decides, writes and reads, without a Ray; tests/cluster has a real one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.distribution import install_command
from retrain.errors import (
    EXIT_CONFIG,
    EXIT_LAUNCH,
    EngineDownError,
    LaunchError,
    RecordsError,
)
from retrain.launchers import Begun, Ended
from retrain.launchers._ray_client import BY_COMMAND, NO_ROOM, Job, _why_silent
from retrain.launchers._ray_local import Local
from retrain.launchers._ray_marks import Taken
from retrain.launchers._ray_queue import Queue
from retrain.launchers._ray_watch import Watch
from retrain.launchers.ray import RayLauncher
from retrain.locks.held import hold
from retrain.records.layout import RunFiles
from retrain.records.run_state import write_done
from tests.remembering_ray import Jobs, assignment, launcher, look

Retrain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def two_at_a_time(tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> RayLauncher:
    made = launcher(assignment(tmp_path / "camp", 5, workers=2), jobs, monkeypatch)
    made.submit(["r0", "r1", "r2", "r3", "r4"])
    return made


def test_ray_is_given_as_many_jobs_as_there_may_be_workers(two_at_a_time: RayLauncher, jobs: Jobs) -> None:
    assert list(jobs.all) == ["camp.r0.1", "camp.r1.1"]
    look(two_at_a_time)
    assert len(jobs.all) == 2


def test_a_place_that_nobody_handed_on_is_filled(two_at_a_time: RayLauncher, jobs: Jobs) -> None:
    jobs.becomes("camp.r0.1", "FAILED", error="JOB_SUPERVISOR_ACTOR_DIED", message="node lost")
    (begun, ended) = look(two_at_a_time)
    assert begun == Begun("r0")
    assert isinstance(ended, Ended)
    assert (ended.run_id, ended.goes_on, ended.is_lost) == ("r0", True, True)
    assert jobs.having("PENDING") == ["camp.r1.1", "camp.r2.1"]


@given(ends=st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.booleans()), max_size=12))
def test_however_jobs_end_and_whoever_hands_on_no_more_go_and_none_twice(
    ends: list[tuple[int, bool, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        jobs = Jobs()
        made = launcher(assignment(tmp_path_factory.mktemp("camp"), 5, workers=2), jobs, patch)
        made.submit([f"r{n}" for n in range(5)])
        for which, hands_on, looks in ends:
            live = jobs.having("PENDING")
            if live:
                name = live[which % len(live)]
                if hands_on:
                    made._queue.fill(jobs, 1)
                jobs.becomes(name, "FAILED")
            if looks:
                look(made)
            assert len(jobs.having("PENDING")) <= 2
        for _ in range(6):
            for name in jobs.having("PENDING"):
                jobs.becomes(name, "FAILED")
            look(made)
        assert sorted(made._queue.parse(name) for name in jobs.all) == [(f"r{n}", 1) for n in range(5)]


def test_a_second_orchestrator_agrees_with_jobs_that_hand_on(
    two_at_a_time: RayLauncher, tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_at_a_time._queue.fill(jobs, 1)  # r0's job hands on
    jobs.becomes("camp.r0.1", "SUCCEEDED")
    second = launcher(assignment(tmp_path / "camp", 5, workers=2), jobs, monkeypatch)
    assert second.queued() == {"r1", "r2"}
    second.adopt(["r1", "r2"])
    second.submit(["r3", "r4"])
    assert jobs.having("PENDING") == ["camp.r1.1", "camp.r2.1"]
    assert second._queue.wanted() == {"r1": 1, "r2": 1, "r3": 1, "r4": 1}


def test_a_cluster_that_forgot_everything_is_given_new_numbers(
    two_at_a_time: RayLauncher, jobs: Jobs
) -> None:
    jobs.all.clear()
    assert look(two_at_a_time) == []  # an answer may be older than the submission
    lost = look(two_at_a_time)
    assert [event.run_id for event in lost] == ["r0", "r1"]
    two_at_a_time.submit(["r0", "r1"])
    assert two_at_a_time._queue.wanted() == {"r0": 2, "r1": 2, "r2": 1, "r3": 1, "r4": 1}


def test_a_worker_that_outlives_its_job_keeps_its_place(
    two_at_a_time: RayLauncher, tmp_path: Path, jobs: Jobs
) -> None:
    lock = hold(RunFiles(tmp_path / "camp/runs/r0").lock)
    assert lock is not None
    with lock:
        jobs.becomes("camp.r0.1", "FAILED")
        assert look(two_at_a_time) == [Begun("r0")]
        assert len(jobs.all) == 2
    assert isinstance(look(two_at_a_time)[0], Ended)
    assert len(jobs.all) == 3


def test_waiting_longer_than_ray_allows_is_no_end(two_at_a_time: RayLauncher, jobs: Jobs) -> None:
    jobs.becomes("camp.r0.1", "FAILED", error=NO_ROOM)
    assert look(two_at_a_time) == []
    assert jobs.having("PENDING") == ["camp.r1.1", "camp.r0.2"]


def test_what_waits_is_taken_back_and_what_runs_is_stopped(two_at_a_time: RayLauncher, jobs: Jobs) -> None:
    jobs.becomes("camp.r0.1", "RUNNING")
    look(two_at_a_time)
    two_at_a_time.cancel([f"r{n}" for n in range(5)], now=False)
    ended = [event for event in look(two_at_a_time) if isinstance(event, Ended)]
    assert {(event.run_id, event.taken_back) for event in ended} == {(f"r{n}", True) for n in range(1, 5)}
    assert set(jobs.stopped) == {"camp.r0.1", "camp.r1.1"}
    assert two_at_a_time._queue.wanted() == {}
    jobs.becomes("camp.r0.1", "STOPPED")
    (last,) = look(two_at_a_time)
    assert (last.run_id, last.taken_back) == ("r0", True)  # type: ignore[union-attr]


def test_a_job_that_starts_after_its_run_was_taken_back_leaves(two_at_a_time: RayLauncher) -> None:
    two_at_a_time.cancel(["r1"], now=True)
    assert two_at_a_time._queue.wants("camp.r0.1")
    assert not two_at_a_time._queue.wants("camp.r1.1")
    assert two_at_a_time._queue.wants("camp.r0.2")  # it replaces one that was lost
    assert two_at_a_time._queue.is_killed("r1", 1)


def test_while_ray_is_silent_what_nobody_works_on_can_be_stopped(
    two_at_a_time: RayLauncher, jobs: Jobs
) -> None:
    jobs.fails = EngineDownError("no answer")
    two_at_a_time.cancel(["r0", "r1", "r2", "r3", "r4"], now=False)
    assert len(look(two_at_a_time)) == 5
    assert two_at_a_time.room() == 2


def test_a_refusal_takes_nothing(tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launcher(assignment(tmp_path / "camp"), jobs, monkeypatch)
    jobs.refuses = LaunchError("bad environment")
    with pytest.raises(LaunchError, match="bad environment"):
        made.submit(["r0", "r1"])
    assert made._queue.wanted() == {}
    assert made.room() == 3


def test_a_queue_that_cannot_be_written_takes_nothing(
    tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = launcher(assignment(tmp_path / "camp"), jobs, monkeypatch)
    (tmp_path / "camp/ray/wanted.json/in the way").mkdir(parents=True)
    with pytest.raises(RecordsError, match=r"wanted\.json"):
        made.submit(["r0", "r1"])
    assert (made.room(), look(made), jobs.all) == (3, [], {})


def test_jobs_of_a_copied_campaign_are_not_taken_for_ours(
    two_at_a_time: RayLauncher, tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = launcher(assignment(tmp_path / "elsewhere" / "camp", 5), jobs, monkeypatch)
    assert copy.queued() == set()
    copy.submit(["r0"])
    assert "camp.r0.2" not in jobs.all  # refused as used; the next look finds that it is not ours
    look(copy)
    assert isinstance(look(copy)[-1], Ended)
    copy.submit(["r0"])
    assert "camp.r0.2" in jobs.all


@pytest.mark.parametrize("run_id", ["r", "a.b_s1", "x+y-1.5_s3", "1.2"])
def test_an_id_names_its_run_and_number(run_id: str, tmp_path: Path) -> None:
    queue = Queue(tmp_path / "camp-2026.x")
    assert queue.parse(queue.id_of(run_id, 12)) == (run_id, 12)
    assert queue.parse(f"other.{run_id}.12") is None
    assert queue.parse("camp-2026.x.12") is None


# One run in Ray's hands


def test_a_job_that_succeeded_waits_for_its_files(tmp_path: Path) -> None:
    files, watch = RunFiles(tmp_path), Watch(1)
    over = Job("camp.r.1", "SUCCEEDED")
    assert watch.look("r", files, over, Taken(1, "camp.r.1")) == [Begun("r")]
    files.done.touch()
    assert [type(event) for event in watch.look("r", files, over, Taken(1, "camp.r.1"))] == [Ended]


def test_a_finished_run_is_done_whatever_ray_still_says(tmp_path: Path) -> None:
    files, at_work = RunFiles(tmp_path), Job("camp.r.1", "RUNNING")
    files.run_toml.write_text('[run]\nconfig_hash = "ab"\n')
    write_done(files.done, "ab", {})
    assert Watch(1).look("r", files, at_work, Taken(1, "camp.r.1")) == [Begun("r"), Ended("r", 0)]


@pytest.mark.parametrize(
    ("said", "short"),
    [
        (
            "HTTPConnectionPool(host='head', port=8265): Max retries exceeded with url: /api/ (Caused by "
            "NewConnectionError(\"HTTPConnection(host='head', port=8265): Failed to establish a new "
            'connection: [Errno 111] Connection refused"))',
            "Connection refused",
        ),
        ("HTTPConnectionPool(host='head', port=8265): Read timed out. (read timeout=60.0)", "timed out"),
        (
            "Could not find any running Ray instance. Please specify the one",
            "Could not find any running Ray instance",
        ),
    ],
)
def test_a_silent_cluster_is_told_of_in_the_networks_own_words(said: str, short: str) -> None:
    assert _why_silent(said) == short


@pytest.mark.parametrize("order", [1, -1])  # Ray's own line is written beside the job's, and may come later
def test_a_worker_that_wrote_nothing_is_spoken_for_by_ray(tmp_path: Path, order: int) -> None:
    output = ["Running entrypoint for job camp.r.1: bash job.sh", "bash: no such file"][::order]
    said = ["Job entrypoint command failed with exit code 127, last available logs:", *output]
    failed = Job("camp.r.1", "FAILED", "\n".join(said), BY_COMMAND, 127)
    ended = Watch(1).look("r", RunFiles(tmp_path), failed, Taken(1, "camp.r.1"))[-1]
    assert isinstance(ended, Ended)
    assert not ended.is_lost
    for part in ("exit code 127", "logs: bash: no such file", "whether the nodes see that directory"):
        assert part in ended.why


# On a machine without Ray


def test_without_ray_nothing_is_created_and_the_user_told(
    retrain: Retrain, campaign_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    done = retrain("run", campaign_file, "--set", "campaign.launcher=ray")
    assert done.returncode == EXIT_LAUNCH
    assert install_command("ray") in done.stderr or "no Ray cluster answers" in done.stderr
    assert not (campaign_file.parent / "logs").exists()


def test_explain_shows_what_would_be_submitted_and_no_secrets(retrain: Retrain, campaign_file: Path) -> None:
    secret = """campaign.ray.runtime_env={env_vars={KEY='s3cret'}}"""
    done = retrain("explain", campaign_file, "--set", "campaign.launcher=ray", "--set", secret)
    assert done.returncode == 0, done.stderr
    assert "entrypoint_num_cpus = 1" in done.stdout
    assert "KEY" in done.stdout
    assert "s3cret" not in done.stdout


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("adress = 'x'", "[campaign.ray].adress: unknown key; did you mean 'address'?"),
        ("poll_seconds = 0.5", "[campaign.ray].poll_seconds: got 0.5; needs at least 2"),
        ("cpus = 0", "[campaign.ray].cpus: got 0; ask for something"),
        ("resources = {tinker = 'x'}", "[campaign.ray].resources.tinker: got 'x'; needs a number above 0"),
        ("resources = {GPU = 1}", "[campaign.ray].resources.GPU: is no custom resource; use the key gpus"),
        ("runtime_env = {working_dir = '.'}", "[campaign.ray].runtime_env.working_dir: '.' would be copied"),
        ("runtime_env = {env_vars = {A = 1}}", "[campaign.ray].runtime_env.env_vars: needs a table of"),
        ('setup = ["""a\nb"""]', "[campaign.ray].setup: 'a\\nb' has more than one line"),
    ],
)
def test_wrong_keys_are_named(line: str, problem: str, retrain: Retrain, campaign_file: Path) -> None:
    ray = f'launcher = "ray"\n[campaign.ray]\n{line}\n[[campaign.conditions]]'
    campaign_file.write_text(campaign_file.read_text().replace("[[campaign.conditions]]", ray, 1))
    done = retrain("explain", campaign_file)
    assert done.returncode == EXIT_CONFIG
    assert problem in done.stderr


def test_a_disk_that_refuses_a_ray_of_this_machine_is_a_launch_that_failed(tmp_path: Path) -> None:
    (tmp_path / "local.out").mkdir()
    with pytest.raises(LaunchError, match=r"could not be started here.*local\.out"):
        Local(tmp_path).start(print)
