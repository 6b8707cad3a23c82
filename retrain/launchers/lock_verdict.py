"""Permits are shared through a directory only if two nodes have proved that they see each other's file locks.

The proof is a file in the campaign's directory, valid while the directories are the same. A failed test is
repeated when the campaign is resumed. The engine's launcher has two nodes run `lock_proof`, and reports if
that fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from retrain.errors import LaunchError
from retrain.launchers import Assignment
from retrain.records.atomic import read_json
from retrain.records.files import remove_file
from retrain.records.layout import CampaignFiles
from retrain.records.stop_request import asked_to_stop

LOOK_S = 2.0  # between two queries to the engine
PROOF_S = 600.0  # how long to wait for two nodes
INSTEAD = 'use permits = "split", which needs no locks, or resume to test again'


class Test(Protocol):
    """Two nodes that run `lock_proof`. Methods raise LaunchError if the engine refuses or is silent."""

    def start(self) -> None:
        """Submit both parts to the engine."""
        ...

    def failure(self) -> str:
        """Return why no answer will come; "" while an answer is possible."""
        ...

    def end(self) -> None:
        """Cancel what has not ended."""
        ...


def directories_of(assignment: Assignment) -> list[Path]:
    """Return the directories in which a campaign's permits may be."""
    return [assignment.directory / "permits", *sorted(assignment.permit_directories)]


def read_verdict(path: Path, directories: Sequence[Path]) -> str | None:
    """Return why locks are not shared; "" if they are; None if no test of these directories is complete.

    Raises:
        RecordsError: the verdict cannot be read.
    """
    found = read_json(path)
    if found is None or found.get("directories") != list(map(str, directories)):
        return None
    return str(found.get("problem", "the test left no answer"))


def is_proved(assignment: Assignment, path: Path, test: Test, rest: Callable[[float], bool]) -> bool:
    """Return True once two nodes have proved that locks are shared.

    Args:
        assignment: determines the directories of permits.
        path: of the verdict.
        test: runs on the nodes if no verdict is known.
        rest: waits for some seconds; True if woken by a stop.

    Returns:
        False if a stop comes first.

    Raises:
        LaunchError: they are not shared, or no verdict came.
    """
    directories, files = directories_of(assignment), CampaignFiles(assignment.directory)
    if read_verdict(path, directories) == "":
        return True
    remove_file(path)
    assignment.say("two nodes test whether they see each other's file locks")
    problem = _ask(path, directories, test, lambda seconds: rest(seconds) or asked_to_stop(files) > 0)
    if problem:
        remove_file(path)  # the cause may be fixed when the campaign is resumed
        raise LaunchError(f"permits cannot be shared through files, because {problem}; {INSTEAD}")
    return problem is not None


def _ask(path: Path, directories: Sequence[Path], test: Test, rest: Callable[[float], bool]) -> str | None:
    until = time.monotonic() + PROOF_S
    problem, is_stopped, failure = None, False, ""
    try:
        test.start()
        while problem is None and not is_stopped and not failure:
            is_stopped = rest(LOOK_S)
            failure = test.failure()  # before the answer is read, because it may come in between
            problem = read_verdict(path, directories)
            if problem is None and time.monotonic() > until:
                failure = failure or f"no answer within {PROOF_S:g} s."
    finally:
        if problem is None:
            with suppress(LaunchError):
                test.end()
    if failure and not problem:
        remove_file(path)
        raise LaunchError(
            f"two nodes could not test whether they see each other's locks: {failure} Or {INSTEAD}"
        )
    return problem
