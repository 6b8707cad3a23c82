import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from retrain.base.errors import RecordsError
from retrain.base.locks import hold, holder, is_held, present_holder, start_mark
from retrain.records.run_state import worker_pids

HOLD = """
import sys, pathlib
from retrain.base.locks import hold
lock = hold(pathlib.Path(sys.argv[1]))
print("held" if lock else "refused", flush=True)
sys.stdin.read()
"""


def _start(path):
    command = [sys.executable, "-c", HOLD, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_lock_is_held_until_released(tmp_path):
    path = tmp_path / "run.lock"
    assert not is_held(path)
    with hold(path):
        assert is_held(path)
    assert not is_held(path)


def test_a_lock_whose_file_server_is_away_is_released_without_an_error(tmp_path, monkeypatch):
    path, flock = tmp_path / "run.lock", fcntl.flock

    def refuse(fd, operation):
        if operation == fcntl.LOCK_UN:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold(path):
        assert is_held(path)
    assert not is_held(path)


def test_watching_where_there_are_no_locks_leaves_no_file_open(tmp_path, monkeypatch):
    path = tmp_path / "run.lock"
    path.touch()

    def refuse(fd, operation):  # as Lustre does without its option `flock`
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = sorted(Path("/dev/fd").iterdir())
    for _ in range(3):
        with pytest.raises(RecordsError, match="Function not implemented"):
            is_held(path)
    assert sorted(Path("/dev/fd").iterdir()) == before


def test_a_second_holder_is_refused_and_told_who_holds(tmp_path):
    path = tmp_path / "run.lock"
    with hold(path):
        assert hold(path) is None
        assert holder(path).pid == os.getpid()
        assert os.uname().nodename in str(holder(path))


def test_a_killed_holder_holds_no_longer(tmp_path):
    path = tmp_path / "run.lock"
    with _start(path) as process:
        assert process.stdout.readline() == "held\n"
        assert is_held(path)
        process.send_signal(signal.SIGKILL)
    assert not is_held(path)


def test_of_many_that_start_at_once_exactly_one_holds(tmp_path):
    started = [_start(tmp_path / "campaign.lock") for _ in range(8)]
    answers = [process.stdout.readline() for process in started]
    for process in started:
        process.communicate()
    assert sorted(answers) == ["held\n"] + ["refused\n"] * 7


def test_watching_a_lock_never_keeps_a_worker_from_taking_it(tmp_path):
    path = tmp_path / "run.lock"
    path.touch()
    stop = threading.Event()

    def watch():
        while not stop.is_set():
            is_held(path)

    watchers = [threading.Thread(target=watch) for _ in range(3)]
    for watcher in watchers:
        watcher.start()
    try:
        for _ in range(100):
            lock = hold(path)
            assert lock is not None
            lock.release()
    finally:
        stop.set()
        for watcher in watchers:
            watcher.join()


FORK_AND_DIE = """
import os, sys, pathlib
from retrain.base.locks import hold
lock = hold(pathlib.Path(sys.argv[1]))
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.readline()
os._exit(0)
"""


def test_a_forked_child_neither_releases_nor_outlives_its_parents_lock(tmp_path):
    path = tmp_path / "run.lock"
    command = [sys.executable, "-c", FORK_AND_DIE, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "forked\n"
        assert is_held(path)
        parent.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        assert not is_held(path)


def test_a_lock_file_is_private_and_a_planted_link_is_refused(tmp_path):
    with hold(tmp_path / "run.lock"):
        assert (tmp_path / "run.lock").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordsError, match="symbolic link"):
        hold(tmp_path / "link.lock")


def test_a_lock_file_without_a_holders_text_names_nobody(tmp_path):
    for text in ("garbage", '{"pid": Infinity, "host": "", "since": ""}'):
        (tmp_path / "run.lock").write_text(text)
        assert holder(tmp_path / "run.lock") is None
    assert holder(tmp_path / "missing.lock") is None


def test_who_holds_a_lock_is_not_mistaken_for_who_held_it_before(tmp_path):
    path = tmp_path / "campaign.lock"
    with _start(path) as dead:
        dead.stdout.readline()
        dead.kill()
    fd = os.open(path, os.O_RDWR)  # holds it, and has not written itself into it yet
    fcntl.flock(fd, fcntl.LOCK_EX)
    own = json.dumps(json.loads(path.read_text()) | {"pid": os.getpid(), "started": start_mark(os.getpid())})
    writer = threading.Timer(0.05, lambda: os.pwrite(fd, own.encode().ljust(os.fstat(fd).st_size), 0))
    assert holder(path).pid == dead.pid
    writer.start()
    assert present_holder(path).pid == os.getpid()
    writer.join()
    os.close(fd)


def test_a_campaigns_workers_are_those_that_hold_its_runs_locks(tmp_path):
    runs = tmp_path / "runs"
    for name in ("alive", "over", "elsewhere", "new"):
        (runs / name).mkdir(parents=True)
    hold(runs / "over" / "run.lock").release()
    (runs / "new" / "run.lock").symlink_to("run.lock")  # leads nowhere: a look at it fails
    worker = _start(runs / "alive" / "run.lock")
    assert worker.stdout.readline() == "held\n"
    with hold(runs / "elsewhere" / "run.lock"):
        stranger = json.loads((runs / "elsewhere" / "run.lock").read_text()) | {"host": "another"}
        (runs / "elsewhere" / "run.lock").write_text(json.dumps(stranger))
        found = worker_pids(runs)
    worker.communicate()
    assert found == {worker.pid}
    assert worker_pids(tmp_path / "no such place") == set()
