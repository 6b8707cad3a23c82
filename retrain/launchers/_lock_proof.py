"""Do two machines see each other's file locks? Asked before permits are shared through a directory.

`python -m retrain.launchers._lock_proof DIRECTORY ...` runs on two nodes at once. The first locks a file
and says so; the second must find it locked, and free again once the first has let go. Both answers are
needed: there are file systems on which every lock is granted, and others on which none is.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from retrain.errors import LaunchError, RecordsError
from retrain.records.atomic import read_json, write_json
from retrain.records.files import make_directory

PATIENCE_S = 120.0  # what a network file system may take to show a new file
PAUSE_S = 0.2


def hold_first(directory: Path, mark: str, host: str) -> None:
    """Be the first node: lock, say so, let go when the other has looked, say so."""
    with _open(directory, mark) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_json(directory / f"proof-{mark}-held.json", {"host": host})
        _await(directory / f"proof-{mark}-looked.json")
    write_json(directory / f"proof-{mark}-freed.json", {"host": host})


def look_second(directory: Path, mark: str, host: str) -> str:
    """Be the second node; gives why locks are not shared, or nothing if they are."""
    other = str(_await(directory / f"proof-{mark}-held.json").get("host"))
    with _open(directory, mark) as lock:
        found_free = _try(lock)
    write_json(directory / f"proof-{mark}-looked.json", {"host": host})
    if other == host:
        return f"both parts of the test ran on {host}, which proves nothing; it needs two nodes"
    if found_free:
        return f"{host} could lock a file in {directory} that {other} had locked"
    _await(directory / f"proof-{mark}-freed.json")
    with _open(directory, mark) as lock:
        if not _try(lock):
            return f"{host} still found a file in {directory} locked that {other} had let go"
    return ""


def read_verdict(path: Path) -> str | None:
    """Give why locks are not shared; "" if they are; None if no test has ended.

    Raises:
        RecordsError: the verdict cannot be read.
    """
    found = read_json(path)
    return None if found is None else str(found.get("problem", "the test left no answer"))


def require(path: Path, start_test: Callable[[], object], say: Callable[[str], None], wait_s: float) -> None:
    """Go on only if two nodes have proved that locks are shared; the verdict is kept in a file.

    Args:
        path: of the verdict.
        start_test: has two nodes run this module; called if no verdict is known.
        say: tells whoever watches.
        wait_s: how long to wait for the verdict.

    Raises:
        LaunchError: they are not shared, or no verdict came.
    """
    problem = read_verdict(path)
    if problem is None:
        start_test()
        say("two nodes test whether they see each other's file locks")
        until = time.monotonic() + wait_s
        while (problem := read_verdict(path)) is None and time.monotonic() < until:
            time.sleep(PAUSE_S)
    if problem is None:
        raise LaunchError(
            f"{path}: no two nodes have tested file locks in {wait_s:g} s; resume when they are free"
        )
    if problem:
        raise LaunchError(
            f"{path}: permits cannot be shared through files, because {problem}; "
            'use permits = "split", which needs no locks, or remove that file to test again'
        )


def _open(directory: Path, mark: str) -> _Lock:
    return _Lock(os.open(directory / f"proof-{mark}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


class _Lock:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def __enter__(self) -> _Lock:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def _try(lock: _Lock) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _await(path: Path) -> dict[str, object]:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        found = read_json(path)
        if found is not None:
            return found
        time.sleep(PAUSE_S)
    raise LaunchError(f"{path}: did not appear within {PATIENCE_S:g} s; do both nodes see that directory?")


def main(verdict: Path, directories: Sequence[Path], rank: int, mark: str, host: str) -> None:
    """Be one of the two nodes, for every directory in turn; the second writes the verdict."""
    problem = ""
    for directory in directories:
        make_directory(directory)
        if rank == 0:
            hold_first(directory, mark, host)
            continue
        try:
            problem = problem or look_second(directory, mark, host)
        except (LaunchError, RecordsError, OSError) as error:
            problem = problem or str(error)
    if rank == 1:
        write_json(verdict, {"problem": problem, "by": host})


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        [Path(argument) for argument in sys.argv[2:]],
        int(os.environ["SLURM_PROCID"]),
        os.environ["SLURM_JOB_ID"],
        os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
    )
