"""Tests whether two machines see each other's file locks, before permits are shared through a directory.

`python -m retrain.launchers.lock_proof VERDICT DIRECTORY ... RANK MARK NODE` runs on two nodes at once: rank
0 and 1, each with its node's name, and a mark unique to this test. The first locks a file; the second must
find it locked, and free once the first has released it. Both answers are needed: some file systems grant
every lock, others none. `shared_permits` waits for the answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from retrain.errors import EXIT_DONE, EXIT_LAUNCH, LaunchError, RecordsError
from retrain.locks.descriptors import LockFile
from retrain.records.files import make_directory, read_json, write_json

PATIENCE_S = 120.0  # how long a network file system may take to show a new file
PAUSE_S = 0.2
SIGNS = ("held", "looked", "freed")


def hold_first(directory: Path, mark: str, node: str) -> None:
    """Act as the first node: lock, and release once the other has looked."""
    with closing(LockFile(str(_lock(directory, mark)))) as file:
        file.lock()
        write_json(_sign(directory, mark, "held"), {"node": node})
        _await(_sign(directory, mark, "looked"))
    write_json(_sign(directory, mark, "freed"), {"node": node})


def look_second(directory: Path, mark: str, node: str) -> str:
    """Act as the second node, which cleans up; return why locks are not shared, or nothing."""
    other = str(_await(_sign(directory, mark, "held")).get("node"))
    was_free = _can_lock(directory, mark)
    write_json(_sign(directory, mark, "looked"), {"node": node})
    _await(_sign(directory, mark, "freed"))
    is_free = _can_lock(directory, mark)
    for path in (_lock(directory, mark), *(_sign(directory, mark, sign) for sign in SIGNS)):
        path.unlink(missing_ok=True)
    if other == node:
        return f"both parts of the test ran on {node}; it needs two nodes"
    if was_free:
        return f"{node} could lock a file in {directory} that {other} had locked"
    return "" if is_free else f"{node} still found a file in {directory} locked after {other} had released it"


def _sign(directory: Path, mark: str, sign: str) -> Path:
    return directory / f"proof-{mark}-{sign}.json"


def _lock(directory: Path, mark: str) -> Path:
    return directory / f"proof-{mark}.lock"


def _can_lock(directory: Path, mark: str) -> bool:
    with closing(LockFile(str(_lock(directory, mark)))) as file:
        return file.try_lock()


def _await(path: Path) -> dict[str, object]:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        found = read_json(path)
        if found is not None:
            return found
        time.sleep(PAUSE_S)
    raise LaunchError(f"{path}: did not appear within {PATIENCE_S:g} s; do both nodes see that directory?")


def main(verdict: Path, directories: Sequence[Path], rank: int, mark: str, node: str) -> int:
    """Act as one of the two nodes for every directory; return an exit code.

    The second writes the verdict, or the first if it fails, so that the other does not wait for it.
    """
    problem = ""
    try:
        for directory in directories:
            make_directory(directory)
            if rank == 0:
                hold_first(directory, mark, node)
            else:
                problem = problem or look_second(directory, mark, node)
    except (LaunchError, RecordsError, OSError) as error:
        problem = str(error)
    if rank == 1 or problem:
        write_json(verdict, {"problem": problem, "by": node, "directories": list(map(str, directories))})
    return EXIT_LAUNCH if problem else EXIT_DONE


if __name__ == "__main__":
    answer, *tested, number, name, here = sys.argv[1:]
    sys.exit(main(Path(answer), list(map(Path, tested)), int(number), name, here))
