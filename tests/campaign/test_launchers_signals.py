"""Signals go to whom they are meant for, and to nobody who only has the same id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrain.base.locks import signal_holder, start_mark
from retrain.campaign.launchers import Assignment
from retrain.campaign.launchers.local import open_launcher

HOLDER = """
import sys
from pathlib import Path
from retrain.base.locks import hold
lock = hold(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    lock = tmp_path / "run.lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield lock, process
    process.kill()
    process.communicate()


def test_a_holder_is_signalled_by_its_lock(held: tuple[Path, subprocess.Popen[str]]) -> None:
    lock, process = held
    assert signal_holder(lock, signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM
    assert not signal_holder(lock, signal.SIGTERM)


def test_an_adopted_worker_is_signalled_although_its_lock_cannot_be_read_any_more(
    held: tuple[Path, subprocess.Popen[str]],
) -> None:
    lock, process = held
    where = lock.parent
    launcher = open_launcher(Assignment("c", where, {"a": where}, 1, None, where=where))
    launcher.adopt(["a"])
    lock.rename(where / "elsewhere")
    lock.mkdir()
    launcher.cancel(["a"], now=False)
    assert process.wait() == -signal.SIGTERM


def test_a_process_that_got_a_dead_holders_id_is_left_alone(
    held: tuple[Path, subprocess.Popen[str]],
) -> None:
    lock, process = held
    text = lock.read_text()
    lock.write_text(text.replace(start_mark(process.pid), "another boot:1"))
    assert not signal_holder(lock, signal.SIGKILL)
    lock.write_text(text.replace(f'"host": "{os.uname().nodename}"', '"host": "another machine"'))
    assert not signal_holder(lock, signal.SIGKILL)
    assert process.poll() is None


def test_a_mark_is_a_processs_own_and_gone_with_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert start_mark(process.pid) == start_mark(process.pid) != ""
    assert start_mark(process.pid) != start_mark(os.getpid())
    process.communicate(b"\n")
    assert start_mark(process.pid) == ""


def test_a_process_that_a_lock_file_only_names_is_left_alone(
    held: tuple[Path, subprocess.Popen[str]],
) -> None:
    """Who can write to a directory can name any process there, with its true start."""
    lock, holder = held
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        text = lock.read_text().replace(f'"pid": {holder.pid},', f'"pid": {victim.pid},')
        lock.write_text(text.replace(start_mark(holder.pid), start_mark(victim.pid)))
        assert not signal_holder(lock, signal.SIGKILL)
        launcher = open_launcher(Assignment("c", lock.parent, {"a": lock.parent}, 1, None, where=lock.parent))
        launcher.adopt(["a"])
        launcher.cancel(["a"], now=True)
        victim.communicate(b"\n")
        assert victim.returncode == 0
    assert holder.poll() is None


def test_a_holder_that_belongs_to_another_user_is_left_alone(
    held: tuple[Path, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, holder = held
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not signal_holder(lock, signal.SIGKILL)
    assert holder.poll() is None


def test_a_worker_that_cannot_be_signalled_is_named(held: tuple[Path, subprocess.Popen[str]]) -> None:
    lock, holder = held
    lock.write_text(lock.read_text().replace(f'"pid": {holder.pid},', f'"pid": {os.getpid()},'))
    said: list[str] = []
    where = lock.parent
    launcher = open_launcher(Assignment("c", where, {"a": where}, 1, None, where=where, say=said.append))
    launcher.adopt(["a"])
    launcher.cancel(["a"], now=False)
    assert len(said) == 1
    assert "a: " in said[0]
    assert str(lock) in said[0]
