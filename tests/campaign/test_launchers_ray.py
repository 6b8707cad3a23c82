"""What the Ray launcher submits, reads and concludes, without a Ray; tests/cluster has a real one."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.base.errors import (
    ClusterDownError,
    LaunchError,
    RecordsError,
)
from retrain.base.locks import hold
from retrain.campaign.launchers import Begun, Ended
from retrain.campaign.launchers.ray import RayLauncher, driver, task
from retrain.campaign.launchers.ray.client import BY_COMMAND, NO_ROOM, LocalJobs, why_silent
from retrain.campaign.launchers.ray.home import Home, TaskEvent
from retrain.config.schema import RaySection
from retrain.records.layout import RunFiles
from retrain.records.run_state import write_done
from tests.ray_pieces import Jobs, Threads, assignment, drive, order, poll

Retrain = Callable[..., subprocess.CompletedProcess[str]]
RUNS = [f"r{n}" for n in range(5)]
SLOW = 'touch "$2/started"; exec sleep 600'


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "camp")


def launcher(campaign: Path, jobs: Jobs, table: RaySection | None = None) -> RayLauncher:
    return RayLauncher(assignment(campaign, 5, workers=2), table or RaySection(), jobs)


@pytest.fixture
def made(tmp_path: Path, jobs: Jobs) -> RayLauncher:
    """A launcher that was given five runs, two at a time."""
    made = launcher(tmp_path / "camp", jobs)
    made.submit(RUNS)
    return made


def work(home: Home, number: int = 1, script: str = "exit 4", cluster: Threads | None = None) -> None:
    """Be the driver, whose workers are these lines of shell."""
    home.script.write_text(script)
    drive(home, cluster, number)


def test_a_campaign_is_one_job_however_many_runs_are_submitted(
    made: RayLauncher, jobs: Jobs, tmp_path: Path
) -> None:
    made.submit(["r0"])
    assert list(jobs.all) == ["camp.1"]
    (command,) = jobs.entrypoints
    assert shlex.split(command)[2:] == ["retrain.campaign.launchers.ray.driver", str(tmp_path / "camp"), "1"]


def test_a_look_asks_one_question(made: RayLauncher, jobs: Jobs) -> None:
    before = jobs.questions
    poll(made)
    assert jobs.questions == before + 1


def test_what_the_driver_did_is_told_once(made: RayLauncher, home: Home) -> None:
    work(home)
    happened = poll(made)
    assert happened == [event for r in RUNS for event in (Begun(r), Ended(r, 4))]
    assert poll(made) == []


@pytest.mark.parametrize("line", ['{"run_id": "r0", "what', "[]", '{"run": "r0"}', "null"])
def test_a_damaged_line_of_the_driver_is_skipped(line: str, made: RayLauncher, home: Home) -> None:
    (home.directory / "events.jsonl").write_text(f"{line}\n")
    work(home)
    assert [event for event in poll(made) if isinstance(event, Ended)] == [Ended(r, 4) for r in RUNS]


def test_a_run_that_goes_on_has_begun(made: RayLauncher, home: Home) -> None:
    lock = hold(RunFiles(home.campaign / "runs/r0").lock)  # as its worker does
    assert lock is not None
    with lock:
        assert poll(made) == [Begun("r0")]


def test_a_lost_run_is_handed_to_the_retry_policy_and_gets_a_new_number(
    made: RayLauncher, home: Home, jobs: Jobs
) -> None:
    cluster = Threads()
    cluster.loses = [f"r0.1.{life}" for life in range(9)]
    work(home, cluster=cluster)
    ended = poll(made)[0]
    assert isinstance(ended, Ended)
    assert (ended.run_id, ended.cut_short, ended.is_lost) == ("r0", True, True)
    assert "NodeDiedError: gone" in ended.why
    assert home.orders().runs == {}  # so the driver leaves it alone, whatever that policy decides
    made.submit(["r0"])
    assert home.orders().runs == {"r0": 2}


def test_a_driver_that_had_worked_is_replaced(made: RayLauncher, home: Home, jobs: Jobs) -> None:
    cluster = Threads()

    def die() -> None:
        raise RuntimeError("killed")

    cluster.first_poll = die
    with pytest.raises(RuntimeError, match="killed"):
        work(home, cluster=cluster)
    jobs.becomes("camp.1", "FAILED", error="JOB_SUPERVISOR_ACTOR_DIED")
    assert not [event for event in poll(made) if isinstance(event, Ended)]
    assert list(jobs.all) == ["camp.1", "camp.2"]
    cluster = Threads()
    work(home, 2, cluster=cluster)
    assert cluster.started[:2] == ["r0.1.2", "r1.1.2"]
    assert [event for event in poll(made) if isinstance(event, Ended)] == [Ended(r, 4) for r in RUNS]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE, errno.EACCES])
def test_a_driver_waits_until_it_can_stop_what_an_earlier_one_left(
    number: int, made: RayLauncher, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = TaskEvent("r0", 1)
    home.write_event(left)
    failures = [OSError(number, os.strerror(number))] * 2
    touch = Path.touch

    def fail_twice(path: Path) -> None:
        if failures:
            raise failures.pop()
        touch(path)

    monkeypatch.setattr(Path, "touch", fail_twice)
    if number == errno.EACCES:  # does not change by itself
        with pytest.raises(RecordsError, match=r"r0\.1\.1\.save: cannot write"):
            work(home, 2)
        return
    work(home)
    assert (home.directory / f"stopped/{left.name}.save").exists()
    assert [event.run_id for event in poll(made) if isinstance(event, Ended)] == RUNS


def test_a_stop_request_that_cannot_be_looked_up_ends_no_worker(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("sleep 1.3; exit 7")
    too_long = str(tmp_path / ("x" * 300))  # an error of the file system, as of a server that restarts
    assert task.work(str(tmp_path / "script"), str(tmp_path), too_long) == 7


@pytest.mark.parametrize(("error", "is_lost"), [(BY_COMMAND, False), ("JOB_SUPERVISOR_ACTOR_DIED", True)])
def test_a_driver_that_never_worked_is_the_end_of_its_runs(
    error: str, is_lost: bool, made: RayLauncher, home: Home, jobs: Jobs
) -> None:
    jobs.becomes("camp.1", "FAILED", error=error, message="it failed\nbash: /nowhere/python: not found")
    ended = poll(made)
    assert [(event.run_id, event.is_lost) for event in ended] == [(r, is_lost) for r in RUNS]  # type: ignore[union-attr]
    assert "whether the nodes see that directory" in ended[0].why  # type: ignore[union-attr]
    assert "it failed: bash: /nowhere/python: not found" in ended[0].why  # type: ignore[union-attr]
    assert "/nowhere/python" in (home.campaign / "runs/r0/engine-camp.1.out").read_text()
    assert list(jobs.all) == ["camp.1"]


@pytest.mark.parametrize("change", [{"status": "SUCCEEDED"}, {"status": "FAILED", "error": NO_ROOM}])
def test_a_driver_that_left_or_had_no_room_is_replaced(
    change: dict[str, str], made: RayLauncher, jobs: Jobs
) -> None:
    jobs.becomes("camp.1", **change)
    assert poll(made) == []
    assert list(jobs.all) == ["camp.1", "camp.2"]


def test_a_driver_that_somebody_stopped_takes_its_runs_back(made: RayLauncher, jobs: Jobs) -> None:
    jobs.becomes("camp.1", "STOPPED")
    assert [(event.run_id, event.taken_back) for event in poll(made)] == [(r, True) for r in RUNS]  # type: ignore[union-attr]
    assert list(jobs.all) == ["camp.1"]


def test_a_cluster_that_forgot_the_driver_is_asked_twice(made: RayLauncher, jobs: Jobs) -> None:
    jobs.all.clear()
    assert poll(made) == []  # an answer may be older than the submission
    assert [event.run_id for event in poll(made)] == RUNS
    made.submit(RUNS)
    assert list(jobs.all) == ["camp.2"]


def test_a_later_orchestrator_adopts_what_the_driver_has(
    made: RayLauncher, home: Home, tmp_path: Path, jobs: Jobs
) -> None:
    order(home, runs={"r0": 1})
    work(home)
    order(home, runs=dict.fromkeys(RUNS, 1))
    second = launcher(tmp_path / "camp", jobs)
    assert second.queued() == {"r1", "r2", "r3", "r4"}
    second.adopt(["r1", "r2"])
    second.submit(["r3", "r4"])
    assert list(jobs.all) == ["camp.1"]
    assert home.orders().runs == {"r1": 1, "r2": 1, "r3": 2, "r4": 2}


def test_a_driver_that_is_adopted_gets_the_present_cap(
    made: RayLauncher, home: Home, tmp_path: Path, jobs: Jobs
) -> None:
    second = RayLauncher(assignment(tmp_path / "camp", 5, workers=4), RaySection(), jobs)
    second.adopt(list(second.queued()))
    assert home.orders().workers == 4
    assert list(home.orders().runs) == RUNS


def test_a_worker_that_no_driver_has_is_watched_until_it_has_left(
    made: RayLauncher, tmp_path: Path, jobs: Jobs
) -> None:
    jobs.becomes("camp.1", "FAILED")
    second = launcher(tmp_path / "camp", jobs)
    assert not second.queued()
    lock = hold(RunFiles(tmp_path / "camp/runs/r0").lock)
    assert lock is not None
    with lock:
        second.adopt(["r0"])
        assert poll(second) == [Begun("r0")]
    assert poll(second) == []
    (ended,) = poll(second)
    assert isinstance(ended, Ended)
    assert ended.is_lost


def test_what_waits_is_taken_back_at_once_even_while_ray_is_silent(
    made: RayLauncher, home: Home, jobs: Jobs
) -> None:
    jobs.fails = ClusterDownError("no answer")
    made.cancel(RUNS, now=False)
    assert [(event.run_id, event.taken_back) for event in poll(made)] == [(r, True) for r in RUNS]  # type: ignore[union-attr]
    assert home.orders().runs == {}
    jobs.fails = None
    work(home, script='touch "$2/started"')
    assert not list(home.campaign.glob("runs/*/started"))


def test_what_was_taken_back_before_it_began_can_be_done_later(made: RayLauncher, home: Home) -> None:
    made.cancel(RUNS, now=False)
    poll(made)
    made.submit(RUNS)
    work(home)
    assert [event for event in poll(made) if isinstance(event, Ended)] == [Ended(r, 4) for r in RUNS]


def test_what_runs_is_stopped_and_over_when_its_worker_is(made: RayLauncher, home: Home) -> None:
    cluster = Threads()
    told: list[Begun | Ended] = []

    def stop() -> None:
        if len(list(home.campaign.glob("runs/*/started"))) == 2:
            made.cancel(RUNS, now=False)
            told.extend(poll(made))

    cluster.first_poll = stop
    work(home, script=SLOW, cluster=cluster)
    told += poll(made)
    ended = {event.run_id: event for event in told if isinstance(event, Ended)}
    assert {r: (e.exit_code, e.taken_back) for r, e in ended.items()} == {
        "r0": (-15, False), "r1": (-15, False), "r2": (None, True), "r3": (None, True), "r4": (None, True)
    }  # fmt: skip


def test_a_refusal_takes_nothing(tmp_path: Path, home: Home, jobs: Jobs) -> None:
    made = launcher(tmp_path / "camp", jobs)
    jobs.refuses = LaunchError("bad environment")
    with pytest.raises(LaunchError, match="bad environment"):
        made.submit(["r0", "r1"])
    assert home.orders().runs == {}


def test_a_list_that_cannot_be_written_takes_nothing(tmp_path: Path, home: Home, jobs: Jobs) -> None:
    made = launcher(tmp_path / "camp", jobs)
    (home.directory / "orders.json/in the way").mkdir(parents=True)
    with pytest.raises(RecordsError, match=r"orders\.json"):
        made.submit(["r0", "r1"])
    assert (poll(made), jobs.all) == ([], {})


def test_the_driver_of_a_copied_campaign_is_not_taken_for_ours(
    made: RayLauncher, tmp_path: Path, jobs: Jobs
) -> None:
    copy = launcher(tmp_path / "elsewhere" / "camp", jobs)
    assert not copy.queued()
    copy.submit(["r0"])
    assert list(jobs.all) == ["camp.1", "camp.2"]
    poll(copy)
    assert list(jobs.all) == ["camp.1", "camp.2"]


def test_a_run_that_succeeded_waits_for_its_files(made: RayLauncher, home: Home) -> None:
    order(home, runs={"r0": 1})
    work(home, script="exit 0")
    assert poll(made) == [Begun("r0")]
    RunFiles(home.campaign / "runs/r0").done.touch()
    assert poll(made) == [Ended("r0", 0)]


def test_a_finished_run_is_done_whatever_ray_and_the_driver_still_say(made: RayLauncher, home: Home) -> None:
    files = RunFiles(home.campaign / "runs/r0")
    files.run_toml.write_text('[run]\nconfig_hash = "v2:ab"\n')
    write_done(files.done, "v2:ab", {})
    assert poll(made) == [Begun("r0"), Ended("r0", 0)]


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
    assert why_silent(said) == short


@pytest.mark.parametrize(
    ("said", "shown"), [("Traceback\n  lines\nOSError: no\n", "OSError: no"), (" \n", "ValueError")]
)
def test_a_task_that_failed_without_a_word_is_told_by_its_kind(said: str, shown: str) -> None:
    assert driver.last_line(ValueError(said)) == shown


def test_a_disk_that_refuses_a_ray_of_this_machine_is_a_launch_that_failed(home: Home) -> None:
    home.output.mkdir(parents=True)
    with pytest.raises(LaunchError, match=r"could not be started here.*local\.out"):
        LocalJobs(home, print).submit("camp.1", "true", {})


def test_a_driver_of_this_machine_that_cannot_start_is_told_with_its_last_words(
    tmp_path: Path, home: Home
) -> None:
    table = RaySection(address="local", setup=["echo no such module >&2; exit 3"])
    made = RayLauncher(assignment(tmp_path / "camp", 1), table)
    made.submit(["r0"])
    ended: list[Begun | Ended] = []
    while not ended:
        ended = poll(made)
    assert isinstance(ended[0], Ended)
    assert "no such module" in ended[0].why
