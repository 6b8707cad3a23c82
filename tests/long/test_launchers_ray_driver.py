"""What the driver does with a campaign's runs, on threads instead of nodes; tests/cluster has a real Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from retrain.base.locks import hold
from retrain.campaign.launchers.ray import render, task
from retrain.campaign.launchers.ray.driver import MOST_LIVES
from retrain.campaign.launchers.ray.home import GIVEN, LOST, OVER, Home, TaskEvent
from retrain.config.schema import RaySection
from retrain.records.campaign_state import ask_to_stop
from retrain.records.layout import CampaignFiles
from tests.ray_pieces import Threads, assignment, drive, home_of, order
from tests.semaphore_processes import wait_until
from tests.stopping import has_ended
from tests.trainer.test_trainer import SMALL, make_run

SLOW = "touch $run/started; exec sleep 600"


def ends(home: Home) -> dict[str, tuple[int, str, int | None]]:
    """What the driver wrote last of each run: number, event, exit code."""
    seen = Home(home.campaign)
    seen.read_events()
    return {run_id: (event.number, event.what, event.exit_code) for run_id, event in seen.last.items()}


def test_all_wanted_runs_are_done_in_order_and_never_more_at_a_time(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", runs=6, workers=2, script="exit 4")
    cluster = drive(home)
    assert cluster.started == [f"r{n}.1.1" for n in range(6)]
    assert cluster.most == 2
    assert ends(home) == {f"r{n}": (1, OVER, 4) for n in range(6)}


def test_real_workers_finish_their_runs(tmp_path: Path) -> None:
    campaign = tmp_path / "it's $(here)"
    for run_id in ("r0", "r1"):
        make_run(campaign / "runs" / run_id, SMALL)
    home = home_of(campaign, runs=2)
    home.script.write_text(render(assignment(campaign, 2), RaySection(setup=['echo "$RETRAIN_JOB"'])))
    drive(home)
    assert ends(home) == {"r0": (1, OVER, 0), "r1": (1, OVER, 0)}
    assert (campaign / "runs/r1/done.json").exists()
    assert f"ray {campaign.name}" in (campaign / "runs/r1/output.log").read_text()


def test_a_task_asks_for_what_the_orders_say(tmp_path: Path) -> None:
    assert drive(home_of(tmp_path / "camp")).options == [{"num_cpus": 1}] * 3


def test_a_lost_run_lives_again_while_nobody_watches_but_not_for_ever(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp")
    cluster = Threads()
    cluster.loses = ["r0.1.1", *(f"r1.1.{life}" for life in range(1, MOST_LIVES + 2))]
    drive(home, cluster)
    assert ends(home) == {"r0": (1, OVER, 0), "r1": (1, LOST, None), "r2": (1, OVER, 0)}
    assert cluster.started.count(f"r1.1.{MOST_LIVES}") == 1
    assert f"r1.1.{MOST_LIVES + 1}" not in cluster.started
    assert "NodeDiedError" in (tmp_path / "camp/runs/r1/engine-ray.1.1.out").read_text()


def test_a_lost_run_is_left_to_an_orchestrator_that_lives(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", runs=1)
    lock = hold(CampaignFiles(tmp_path / "camp").lock)
    assert lock is not None
    cluster = Threads()
    cluster.loses = ["r0.1.1"]

    def orchestrate() -> None:
        if ends(home).get("r0") == (1, LOST, None):
            order(home, runs={"r0": 2})
        if ends(home).get("r0") == (2, OVER, 0):
            lock.release()

    cluster.first_poll = orchestrate
    drive(home, cluster)
    assert cluster.started == ["r0.1.1", "r0.2.1"]


def test_workers_of_nobodys_task_keep_their_places(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", runs=3, workers=2)
    lock = hold(home.run("r0").lock)
    assert lock is not None
    cluster = Threads()

    def leave() -> None:
        if {"r1", "r2"} <= ends(home).keys():
            lock.release()

    cluster.first_poll = leave
    drive(home, cluster)
    assert cluster.started == ["r1.1.1", "r2.1.1", "r0.1.1"]
    assert cluster.most == 1


def test_a_run_that_is_locked_elsewhere_is_done_once_it_is_free(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", runs=1, script="[ -e $run/free ] || exit 75")
    cluster, locks = Threads(), []

    def appear_and_leave() -> None:
        if not locks:
            locks.append(hold(home.run("r0").lock))
        elif ends(home)["r0"][1] == LOST:
            (tmp_path / "camp/runs/r0/free").touch()
            locks[0].release()

    cluster.first_poll = appear_and_leave
    drive(home, cluster)
    assert ends(home) == {"r0": (1, OVER, 0)}


def test_code_75_of_a_run_that_nobody_holds_is_its_end(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", runs=1, script="exit 75")
    assert drive(home).started == ["r0.1.1"]
    assert ends(home) == {"r0": (1, OVER, 75)}


def test_a_later_driver_takes_over_what_the_earlier_one_had(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", runs=3, workers=1)
    ledger = tmp_path / "camp/ray/events.jsonl"
    drive(home)
    first = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(first[:3]) + first[2][:20])  # killed while r1 ran
    order(home, driver=2)
    assert drive(Home(home.campaign), number=2).started == ["r1.1.2", "r2.1.1"]
    assert [path.name for path in (home.directory / "stopped").iterdir()] == ["r1.1.1.save"]
    assert ends(home) == {f"r{n}": (1, OVER, 0) for n in range(3)}


def test_a_driver_that_is_not_in_charge_does_nothing(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", number=2)
    assert drive(home, number=1).started == []


def test_a_driver_that_is_no_longer_in_charge_starts_no_more_and_lets_its_workers_end(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", runs=2, workers=1, script="until [ -e $run/free ]; do sleep 0.05; done")
    cluster = Threads()

    def take_over() -> None:
        if home.orders().driver == 1:
            order(home, driver=2)
        else:
            (home.run("r0").directory / "free").touch()

    cluster.first_poll = take_over
    drive(home, cluster)
    assert cluster.started == ["r0.1.1"]
    assert ends(home) == {"r0": (1, GIVEN, None)}  # the driver in charge says what became of it


@pytest.mark.parametrize(("now", "code"), [(False, -signal.SIGTERM), (True, -signal.SIGKILL)])
def test_what_runs_is_stopped_and_what_waits_never_starts(now: bool, code: int, tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", runs=2, workers=1, script=SLOW)
    cluster = Threads()

    def stop() -> None:
        if (tmp_path / "camp/runs/r0/started").exists():
            order(home, stop=dict.fromkeys(("r0", "r1"), 2 if now else 1))

    cluster.first_poll = stop
    drive(home, cluster)
    assert ends(home) == {"r0": (1, OVER, code)}


def test_a_task_without_room_is_taken_back(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", runs=2, workers=2, script=SLOW)
    cluster = Threads(room=1)

    def stop() -> None:
        if (tmp_path / "camp/runs/r0/started").exists():
            order(home, runs={"r0": 1})
        if "r1" in ends(home) and ends(home)["r1"][1] == OVER:
            order(home, stop={"r0": 2})

    cluster.first_poll = stop
    drive(home, cluster)
    assert ends(home)["r1"] == (1, OVER, None)
    assert not (tmp_path / "camp/runs/r1/started").exists()


def test_a_request_to_stop_reaches_workers_without_an_orchestrator(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", runs=2, workers=1, script=SLOW)
    cluster = Threads()

    def stop() -> None:
        if (tmp_path / "camp/runs/r0/started").exists():
            ask_to_stop(CampaignFiles(tmp_path / "camp"), now=False)

    cluster.first_poll = stop
    drive(home, cluster)
    assert ends(home) == {"r0": (1, OVER, -signal.SIGTERM)}


def test_a_node_that_does_not_see_the_directory_is_told_by_its_task(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", runs=1)
    run = tmp_path / "camp/runs/r0"
    run.rmdir()

    class Late(Threads):
        def start(self, *arguments: Any) -> Any:
            task = super().start(*arguments)
            task.exception()  # it has ended before the driver sees the directory
            run.mkdir(exist_ok=True)
            return task

    drive(home, Late())
    assert "No such file or directory" in (tmp_path / "camp/runs/r0/engine-ray.1.1.out").read_text()


# One task


def working(home: Home) -> subprocess.Popen[bytes]:
    """Start a task in a process of its own, as Ray does."""
    arguments = home.task_arguments(TaskEvent("r0", 1))
    work = "from retrain.campaign.launchers.ray.task import work"
    code = f"import sys; {work}; sys.exit(work(*{arguments}) is None)"
    return subprocess.Popen([sys.executable, "-c", code])


def worker_of(home: Home) -> psutil.Process:
    pid = home.run("r0").directory / "pid"
    until = time.monotonic() + 60
    while not pid.exists() or not pid.read_text().endswith("\n"):
        assert time.monotonic() < until
        time.sleep(0.01)
    return psutil.Process(int(pid.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
def test_a_worker_dies_with_its_task_whatever_that_dies_of(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", script="echo $$ > $run/pid; exec sleep 600")
    one = working(home)
    worker = worker_of(home)
    one.kill()
    one.wait()
    wait_until(lambda: has_ended(worker))


def test_what_was_stopped_before_it_began_starts_nothing(tmp_path: Path) -> None:
    home = home_of(tmp_path / "camp", script="touch $run/started")
    home.stop(TaskEvent("r0", 1), now=False)
    assert working(home).wait(60) == 1
    assert not (home.run("r0").directory / "started").exists()
    assert not (home.run("r0").directory / "output.log").exists()


def test_a_task_needs_nothing_of_retrain_on_its_node() -> None:
    code = f"import runpy, sys; runpy.run_path({task.__file__!r}); assert 'retrain' not in sys.modules"
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-I", "-c", code], check=True, env=bare)
