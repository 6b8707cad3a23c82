"""Locks between machines that may not see each other's: a holder elsewhere shows by its lease."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from retrain.base import locks as locks
from retrain.base.errors import EXIT_DONE, EXIT_INFRASTRUCTURE
from retrain.base.locks import hold, holder, is_held, start_mark
from retrain.campaign.launchers import Assignment, Ended, local
from retrain.campaign.run import start
from retrain.records.layout import RunFiles
from retrain.trainer.worker import run as run_worker
from tests.semaphore_processes import wait_until

LONG_S = 60.0  # for a renewal that does come, however busy the machine
SHORT_S = 0.2  # for one that does not come


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "run.lock"


def write_lease(path: Path, age_s: float = 0.0, host: str = "elsewhere", started: str = "x") -> None:
    """Leave what a holder on another machine leaves that this one's kernel knows nothing of."""
    record = {"pid": 1, "host": host, "since": "then", "started": started, "renewed_at": time.time() - age_s}
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.pwrite(fd, json.dumps(record).encode().ljust(200) + b"\n", 0)  # as a holder does: never empty
    os.close(fd)


@contextmanager
def renewed(path: Path, **lease: Any) -> Iterator[None]:
    """Be another machine that holds a lock and renews its lease."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.02):
            write_lease(path, **lease)

    write_lease(path, **lease)
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_lease_that_is_renewed_elsewhere_holds(lock: Path) -> None:
    with renewed(lock):
        assert is_held(lock)
        assert hold(lock, LONG_S) is None


def test_a_lease_whose_holder_died_is_taken_after_a_watch(lock: Path) -> None:
    write_lease(lock)
    assert is_held(lock)
    taken = hold(lock, SHORT_S)
    assert taken is not None
    taken.release()


def test_an_old_lease_is_nobodys(lock: Path) -> None:
    write_lease(lock, age_s=locks.STALE_S + 1)
    assert not is_held(lock)
    taken = hold(lock, watch_s=1e9)
    assert taken is not None
    taken.release()


def test_a_lease_from_a_far_future_does_not_hold_for_ever(lock: Path) -> None:
    write_lease(lock, age_s=-1e9)
    assert not is_held(lock)
    taken = hold(lock, SHORT_S)
    assert taken is not None
    taken.release()


def test_a_lease_from_a_far_future_that_is_renewed_is_respected(lock: Path) -> None:
    with renewed(lock, age_s=-1e9):
        assert hold(lock, LONG_S) is None


def test_a_lease_of_this_machine_is_not_believed_because_its_kernel_knows(lock: Path) -> None:
    with_lock = hold(lock)
    assert with_lock is not None
    with_lock.renew()
    with_lock.release()
    write_lease(lock, host=os.uname().nodename)
    assert not is_held(lock)


def test_a_machine_of_the_same_name_is_told_by_its_boot(lock: Path) -> None:
    here = os.uname().nodename
    write_lease(lock, host=here, started=start_mark(os.getpid()))
    assert not is_held(lock)
    write_lease(lock, host=here, started="6b1c1f4e-0000-4000-8000-000000000000:4711")
    assert is_held(lock)
    found = holder(lock)
    assert found is not None
    assert not found.is_here


def test_a_lease_of_a_machine_of_the_same_name_that_is_renewed_holds(lock: Path) -> None:
    with renewed(lock, host=os.uname().nodename, started="another-boot:1"):
        assert hold(lock, LONG_S) is None


def test_a_lease_goes_on_while_its_holder_lives_and_ends_with_it(lock: Path) -> None:
    held = hold(lock)
    assert held is not None
    held.renew(every_s=0.02)
    first = holder(lock)
    assert first is not None
    wait_until(lambda: (now := holder(lock)) is None or now.renewed_at != first.renewed_at)
    held.release()
    last = holder(lock)
    assert last is not None
    assert last.renewed_at == 0
    assert last.pid == first.pid


def test_a_worker_leaves_a_run_alone_that_another_machine_has(campaign_file: Path) -> None:
    campaign = start(campaign_file, ["campaign.seeds=[0]"])
    files = campaign.files_of(campaign.plan.runs[0].run_id)
    with renewed(files.lock):
        before = {path.name for path in files.directory.iterdir()}
        assert run_worker(files.directory, threading.Event()) == EXIT_INFRASTRUCTURE
        assert {path.name for path in files.directory.iterdir()} == before
    write_lease(files.lock, age_s=locks.STALE_S + 1)
    assert run_worker(files.directory, threading.Event()) == EXIT_DONE


def test_a_worker_that_another_machine_keeps_alive_is_waited_for(tmp_path: Path) -> None:
    write_lease(RunFiles(tmp_path).lock)
    launcher = local.open_launcher(Assignment("c", tmp_path, {"a": tmp_path}, 1, None, where=tmp_path))
    launcher.adopt(["a"])
    assert launcher.poll(0.5) == []
    write_lease(RunFiles(tmp_path).lock, age_s=3600.0)
    assert launcher.poll(60.0) == [Ended("a", None)]
