"""Jobs of Ray that do one run after another, and replace each other when they are lost; without a Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from retrain.errors import EXIT_DONE, EXIT_INFRASTRUCTURE
from retrain.launchers import Begun, Ended
from retrain.launchers._ray_client import BY_COMMAND, NO_ROOM
from retrain.launchers._ray_marks import Marks, Taken
from retrain.launchers._ray_queue import Queue, Terms
from retrain.launchers._ray_repair import MOST_LOST, replace_lost
from retrain.launchers.ray import RayLauncher
from retrain.locks.held import hold
from retrain.records.attempts import begin_attempt
from retrain.records.layout import CampaignFiles, RunFiles
from tests.remembering_ray import Jobs, assignment, launcher, look
from tests.test_trainer import SMALL, make_run

LOST = "JOB_SUPERVISOR_ACTOR_DIED"


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def two_at_a_time(tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> RayLauncher:
    made = launcher(assignment(tmp_path / "camp", 5, workers=2), jobs, monkeypatch)
    made.submit(["r0", "r1", "r2", "r3", "r4"])
    return made


# What a job does


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    campaign = tmp_path / "camp"
    for run_id in ("r0", "r1", "r2"):
        make_run(campaign / "runs" / run_id, SMALL)
    (campaign / "campaign.toml").touch()
    queue = Queue(campaign)
    queue.prepare(Terms(share_s=100.0))
    queue.want({"r0": 1, "r1": 1, "r2": 1})
    return queue


def work(queue: Queue, job: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "retrain.launchers._ray_place", queue.campaign, job]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def done(queue: Queue) -> list[str]:
    return sorted(path.parent.name for path in queue.campaign.glob("runs/*/done.json"))


def test_short_runs_share_a_job(queue: Queue) -> None:
    left = work(queue, "camp.r0.1")
    assert left.returncode == 0, left.stderr
    assert done(queue) == ["r0", "r1", "r2"]
    assert [queue.marks.read(f"r{n}", 1) for n in range(3)] == [Taken(1, "camp.r0.1", EXIT_DONE)] * 3


def test_a_run_that_another_job_has_is_left_to_it(queue: Queue) -> None:
    queue.marks.take("r1", 1, "camp.r1.1")
    work(queue, "camp.r0.1")
    assert done(queue) == ["r0", "r2"]


def test_a_job_that_is_not_to_be_shared_submits_the_next_run(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")  # nobody is there to take it
    queue.prepare(Terms(share_s=0.0))
    left = work(queue, "camp.r0.1")
    assert done(queue) == ["r0"]
    assert "no next run was started from here" in left.stderr


def test_a_job_whose_worker_left_for_its_surroundings_does_no_other_run(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    lock = hold(CampaignFiles(queue.campaign).run("r0").lock)
    assert lock is not None
    with lock:
        assert work(queue, "camp.r0.1").returncode == EXIT_INFRASTRUCTURE
    assert done(queue) == []


def test_what_was_taken_back_is_not_done(queue: Queue) -> None:
    queue.want({"r0": 1, "r2": 1})
    work(queue, "camp.r0.1")
    assert done(queue) == ["r0", "r2"]


def test_a_job_that_ray_forgot_takes_no_more_runs_on(queue: Queue) -> None:
    queue.retire("camp.r0.1")
    work(queue, "camp.r0.1")
    assert done(queue) == ["r0"]
    assert queue.marks.newest() == {"r0": 1}


# Who has taken what


def test_of_two_that_take_a_run_one_gets_it(tmp_path: Path) -> None:
    marks = Marks(tmp_path)
    assert marks.take("a.b", 1, "first")
    assert not marks.take("a.b", 1, "second")
    assert marks.read("a.b", 1) == Taken(1, "first")
    marks.give_back("a.b", 1)
    assert marks.take("a.b", 1, "second")
    assert marks.newest() == {"a.b": 1}


@pytest.mark.parametrize(("codes", "told"), [([75, 0], 0), ([0, 75], 0), ([75], 75), ([-9], -9), ([4], 4)])
def test_a_second_start_of_a_job_hides_no_end(codes: list[int], told: int, tmp_path: Path) -> None:
    marks = Marks(tmp_path)
    marks.take("r", 1, "job")
    for code in codes:
        marks.note_exit("r", 1, code)
    assert marks.read("r", 1) == Taken(1, "job", told)


# What the orchestrator sees of it


def share(made: RayLauncher, jobs: Jobs) -> None:
    """Have r0's job finish r0 and take r2 on."""
    jobs.becomes("camp.r0.1", "RUNNING")
    made._queue.marks.note_exit("r0", 1, EXIT_DONE)
    RunFiles(made._queue.directory_of("r0")).done.touch()
    made._queue.marks.take("r2", 1, "camp.r0.1")


def test_a_run_is_over_before_the_job_that_it_shares(two_at_a_time: RayLauncher, jobs: Jobs) -> None:
    share(two_at_a_time, jobs)
    assert look(two_at_a_time) == [Begun("r0"), Ended("r0", EXIT_DONE), Begun("r2")]
    assert list(jobs.all) == ["camp.r0.1", "camp.r1.1"]


def test_a_run_in_a_shared_job_that_is_lost_goes_on_in_its_own(
    two_at_a_time: RayLauncher, jobs: Jobs
) -> None:
    share(two_at_a_time, jobs)
    jobs.becomes("camp.r0.1", "FAILED", error=LOST)
    ended = look(two_at_a_time)[-1]
    assert isinstance(ended, Ended)
    assert (ended.run_id, ended.goes_on) == ("r2", True)
    two_at_a_time.submit(["r2"])
    assert two_at_a_time._queue.wanted()["r2"] == 2


def test_a_shared_job_is_stopped_for_the_run_that_it_does(two_at_a_time: RayLauncher, jobs: Jobs) -> None:
    share(two_at_a_time, jobs)
    look(two_at_a_time)
    two_at_a_time.cancel(["r2"], now=False)
    look(two_at_a_time)
    assert jobs.stopped == ["camp.r0.1"]


def test_a_later_orchestrator_adopts_what_shares_a_job(
    two_at_a_time: RayLauncher, tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    share(two_at_a_time, jobs)
    second = launcher(assignment(tmp_path / "camp", 5, workers=2), jobs, monkeypatch)
    assert second.queued() == {"r1", "r2"}
    second.adopt(["r1", "r2"])
    second.submit(["r3", "r4"])
    assert list(jobs.all) == ["camp.r0.1", "camp.r1.1"]


def test_a_job_that_a_new_head_does_not_know_is_retired(
    two_at_a_time: RayLauncher, tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    share(two_at_a_time, jobs)
    jobs.all.clear()
    second = launcher(assignment(tmp_path / "camp", 5, workers=2), jobs, monkeypatch)
    assert second.queued() == set()
    assert second._queue.is_retired("camp.r0.1")
    assert second._queue.is_retired("camp.r1.1")
    assert not second._queue.is_retired("camp.r2.1")


# Lost jobs, while no orchestrator looks


def test_a_lost_job_is_replaced_once(two_at_a_time: RayLauncher, jobs: Jobs) -> None:
    jobs.becomes("camp.r0.1", "FAILED", error=LOST)
    jobs.becomes("camp.r1.1", "RUNNING")
    assert replace_lost(two_at_a_time._queue, jobs, "camp.r1.1")[0] == ["r0"]
    assert replace_lost(two_at_a_time._queue, jobs, "camp.r1.1") == ([], [])
    assert jobs.having("PENDING", "RUNNING") == ["camp.r1.1", "camp.r0.2"]
    assert two_at_a_time._queue.wants("camp.r0.2")


def test_a_job_that_waited_too_long_is_replaced_however_often(two_at_a_time: RayLauncher, jobs: Jobs) -> None:
    jobs.becomes("camp.r1.1", "RUNNING")
    for number in range(1, MOST_LOST + 3):
        jobs.becomes(f"camp.r0.{number}", "FAILED", error=NO_ROOM)
        assert replace_lost(two_at_a_time._queue, jobs, "camp.r1.1")[0] == ["r0"]


def test_a_run_that_a_shared_job_had_when_it_was_lost_gets_its_own(
    two_at_a_time: RayLauncher, jobs: Jobs
) -> None:
    share(two_at_a_time, jobs)
    jobs.becomes("camp.r0.1", "FAILED", error=LOST)
    jobs.becomes("camp.r1.1", "RUNNING")
    assert replace_lost(two_at_a_time._queue, jobs, "camp.r1.1")[0] == ["r2"]
    assert jobs.having("PENDING") == ["camp.r2.2"]


def test_a_run_that_nobody_works_on_though_ray_says_so_is_looked_at_again(
    two_at_a_time: RayLauncher, jobs: Jobs
) -> None:
    jobs.becomes("camp.r0.1", "RUNNING")
    assert replace_lost(two_at_a_time._queue, jobs, "camp.r1.1") == ([], ["r0"])


def test_the_last_job_knows_that_nobody_looks_after_it(two_at_a_time: RayLauncher) -> None:
    queue = two_at_a_time._queue
    queue.marks.note_exit("r0", 1, EXIT_DONE)
    assert not queue.leaves_only_lost()  # r2 and more wait
    queue.want({"r0": 1, "r1": 1})
    assert queue.leaves_only_lost()
    lock = hold(RunFiles(queue.directory_of("r1")).lock)
    assert lock is not None
    with lock:
        assert not queue.leaves_only_lost()


@pytest.mark.parametrize("error", [BY_COMMAND, LOST])
def test_a_run_whose_worker_left_is_for_an_orchestrator(
    error: str, two_at_a_time: RayLauncher, jobs: Jobs
) -> None:
    two_at_a_time._queue.marks.note_exit("r0", 1, -9)
    jobs.becomes("camp.r0.1", "FAILED", error=error)
    assert replace_lost(two_at_a_time._queue, jobs, "camp.r1.1") == ([], [])


def test_a_job_that_ray_does_not_count_replaces_nothing(two_at_a_time: RayLauncher, jobs: Jobs) -> None:
    jobs.becomes("camp.r0.1", "FAILED", error=LOST)
    del jobs.all["camp.r1.1"]
    assert replace_lost(two_at_a_time._queue, jobs, "camp.r1.1") == ([], [])


def test_a_run_that_lives_though_its_job_is_lost_is_not_replaced(
    two_at_a_time: RayLauncher, jobs: Jobs
) -> None:
    jobs.becomes("camp.r0.1", "FAILED", error=LOST)
    lock = hold(RunFiles(two_at_a_time._queue.directory_of("r0")).lock)
    assert lock is not None
    with lock:
        assert replace_lost(two_at_a_time._queue, jobs, "camp.r1.1") == ([], [])


def test_a_run_that_is_lost_again_and_again_waits_for_an_orchestrator(
    two_at_a_time: RayLauncher, jobs: Jobs
) -> None:
    jobs.becomes("camp.r0.1", "FAILED", error=LOST)
    for _ in range(MOST_LOST + 1):
        begin_attempt(RunFiles(two_at_a_time._queue.directory_of("r0")).attempts)
    assert replace_lost(two_at_a_time._queue, jobs, "camp.r1.1") == ([], [])


def test_an_orchestrator_that_comes_back_goes_on_with_replaced_jobs(
    two_at_a_time: RayLauncher, tmp_path: Path, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.becomes("camp.r0.1", "FAILED", error=LOST)
    replace_lost(two_at_a_time._queue, jobs, "camp.r1.1")
    second = launcher(assignment(tmp_path / "camp", 5, workers=2), jobs, monkeypatch)
    assert second.queued() == {"r0", "r1"}
    second.adopt(["r0", "r1"])
    second.submit(["r2", "r3", "r4"])
    assert jobs.having("PENDING") == ["camp.r1.1", "camp.r0.2"]
    assert second._queue.wanted()["r0"] == 2
