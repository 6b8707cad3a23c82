"""How machines share permits: each worker gets a part, or all use one semaphore if file locks are shared.

Two nodes must first prove that they see each other's file locks, by running `lock_proof`. The proof is a file
in the campaign's directory, valid while the directories of permits are the same. A failed test is repeated
when the campaign is resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from retrain.errors import LaunchError
from retrain.launchers import Assignment
from retrain.records.files import read_json, remove_file
from retrain.records.layout import CampaignFiles
from retrain.records.stop_request import asked_to_stop

SHARED = "shared"
LOOK_S = 2.0  # between two queries to the engine
PROOF_S = 600.0  # how long to wait for two nodes
INSTEAD = 'use permits = "split", which needs no locks, or resume to test again'


def workers_at_a_time(assignment: Assignment, permits: str) -> int:
    """Return how many runs may execute at a time: with split permits, each needs at least one."""
    if permits == SHARED or assignment.permits is None or assignment.permits_adapt:
        return assignment.workers
    return min(assignment.workers, assignment.permits)


def own_permits(assignment: Assignment, permits: str) -> list[str]:
    """Return the script line that sets a worker's own permits, if it has any."""
    if permits == SHARED or assignment.permits is None:
        return []
    own = max(1, assignment.permits // workers_at_a_time(assignment, permits))
    return [f"export RETRAIN_OWN_PERMITS={own}"]


def sharing_problems(assignment: Assignment, permits: str, table: str) -> list[str]:
    """Return a problem if split permits are to be shared with other campaigns."""
    if permits == SHARED or not assignment.permit_directories:
        return []
    return [
        "[backend].throttle_dir: permits shared through a directory may be given out twice by machines "
        f'that do not see each other\'s file locks; with [{table}].permits = "shared", two nodes '
        "first test that they do"
    ]


def directories_of(assignment: Assignment) -> list[Path]:
    """Return the directories in which a campaign's permits may be."""
    return [assignment.directory / "permits", *sorted(assignment.permit_directories)]


def read_verdict(path: Path, directories: Sequence[Path]) -> str | None:
    """Return why locks are not shared; "" if they are; None if no test of these directories is complete."""
    found = read_json(path)
    if found is None or found.get("directories") != list(map(str, directories)):
        return None
    return str(found.get("problem", "the test left no answer"))


class LockTest:
    """Two nodes that run `lock_proof`; a launcher's subclass starts them."""

    def __init__(self, assignment: Assignment, path: Path) -> None:
        self._assignment = assignment
        self._path = path
        self._directories = directories_of(assignment)

    def start(self) -> None:
        """Submit both parts to the engine; like the others, raises LaunchError if it refuses or is silent."""
        raise NotImplementedError

    def failure(self) -> str:
        """Return why no answer will come; "" while an answer is possible."""
        raise NotImplementedError

    def end(self) -> None:
        """Cancel what has not ended."""
        raise NotImplementedError

    def is_passed(self, rest: Callable[[float], bool]) -> bool:
        """Return True once two nodes have proved that locks are shared, False if a stop comes first.

        Args:
            rest: waits for some seconds; True if woken by a stop.

        Raises:
            LaunchError: they are not shared, or no verdict came.
        """
        if self._verdict() == "":
            return True
        remove_file(self._path)
        self._assignment.say("two nodes test whether they see each other's file locks")
        problem = self._run(rest)
        if problem:
            remove_file(self._path)  # the cause may be fixed when the campaign is resumed
            raise LaunchError(f"permits cannot be shared through files, because {problem}; {INSTEAD}")
        return problem is not None

    def _verdict(self) -> str | None:
        return read_verdict(self._path, self._directories)

    def _run(self, rest: Callable[[float], bool]) -> str | None:
        until, files = time.monotonic() + PROOF_S, CampaignFiles(self._assignment.directory)
        problem, is_stopped, failure = None, False, ""
        try:
            self.start()
            while problem is None and not is_stopped and not failure:
                is_stopped = rest(LOOK_S) or asked_to_stop(files) > 0
                failure = self.failure()  # before the answer is read, because it may come in between
                problem = self._verdict()
                if problem is None and time.monotonic() > until:
                    failure = failure or f"no answer within {PROOF_S:g} s."
        finally:
            if problem is None:
                with suppress(LaunchError):
                    self.end()
        if failure and not problem:
            remove_file(self._path)
            raise LaunchError(
                f"two nodes could not test whether they see each other's locks: {failure} Or {INSTEAD}"
            )
        return problem
