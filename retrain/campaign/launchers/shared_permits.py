"""How machines share permits: each worker gets a part, or all use one semaphore if file locks are shared.

Two nodes must first prove that they see each other's file locks. Each runs `python -m
retrain.campaign.launchers.shared_permits VERDICT DIRECTORY ... RANK MARK NODE`: rank 0 and 1, a mark unique
to this test, and the node's name. The first locks a file; the second must find it locked, and free once the
first has released it. Both answers are needed: some file systems grant every lock, others none. The verdict
is a file in the campaign's directory, valid while the directories of permits are the same. A failed test is
repeated when the campaign is resumed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

from retrain.base.errors import EXIT_DONE, EXIT_LAUNCH, LaunchError, RecordsError
from retrain.base.locks import LockFile, locked
from retrain.campaign.launchers import Assignment
from retrain.config.schema import RaySection, SlurmSection
from retrain.records.campaign_state import asked_to_stop
from retrain.records.files import make_directory, read_json, remove_file, write_json
from retrain.records.layout import CampaignFiles

SHARED = "shared"
NO_LINE = "\n\r\0"  # text after the first two would be a separate line and command
MODULE = "retrain.campaign.launchers.shared_permits"  # what each node runs
POLL_S = 2.0  # between two queries to the cluster
PROOF_S = 600.0  # how long to wait for two nodes
INSTEAD = 'use permits = "split", which needs no locks, or resume to test again'
PATIENCE_S = 120.0  # how long a network file system may take to show a new file
PAUSE_S = 0.2


def workers_at_a_time(assignment: Assignment, permits: str) -> int:
    """Return how many runs may execute at a time: with split permits, each needs at least one."""
    if permits == SHARED or assignment.permits is None or assignment.permits_adapt:
        return assignment.workers
    return min(assignment.workers, assignment.permits)


def own_permits(assignment: Assignment, permits: str) -> list[str]:
    """Return the script line that sets a worker's own permits, if it has any."""
    if permits == SHARED or assignment.permits is None:
        return []
    share = max(1, assignment.permits // workers_at_a_time(assignment, permits))
    return [f"export RETRAIN_OWN_PERMITS={share}"]


def table_problems(assignment: Assignment, table: SlurmSection | RaySection, where: str) -> list[str]:
    """Return problems that hold on every cluster: broken lines, and split permits that are shared."""
    texts_by_key = {key: value if isinstance(value, list) else [value] for key, value in vars(table).items()}
    problems = [
        f"[{where}].{key}: {text!r} has more than one line; use one string per line"
        for key, texts in texts_by_key.items()
        for text in texts
        if isinstance(text, str) and any(character in text for character in NO_LINE)
    ]
    if table.permits != SHARED and assignment.permit_directories:
        problems.append(
            "[backend].throttle_dir: permits shared through a directory may be given out twice by machines "
            f'that do not see each other\'s file locks; with [{where}].permits = "shared", two nodes '
            "first test that they do"
        )
    return problems


def directories_of(assignment: Assignment) -> list[Path]:
    """Return the directories in which a campaign's permits may be."""
    return [assignment.directory / "permits", *sorted(assignment.permit_directories)]


def read_verdict(path: Path, directories: Sequence[Path]) -> str | None:
    """Return why locks are not shared; "" if they are; None if no test of these directories is complete."""
    answer = read_json(path)
    if answer is None or answer.get("directories") != list(map(str, directories)):
        return None
    return str(answer.get("problem", "the test left no answer"))


class LockTest:
    """Two nodes that run this module; a launcher's subclass starts them."""

    def __init__(self, assignment: Assignment, path: Path) -> None:
        self._assignment = assignment
        self._path = path
        self._directories = directories_of(assignment)

    def start(self) -> None:
        """Submit both parts to the cluster; all raise LaunchError if it refuses or is silent."""
        raise NotImplementedError

    def failure(self) -> str:
        """Return why no answer will come; "" while an answer is possible."""
        raise NotImplementedError

    def end(self) -> None:
        """Cancel what has not ended."""
        raise NotImplementedError

    def is_passed(self, rest: Callable[[float], bool]) -> bool:
        """Return True once two nodes have proved that locks are shared, False if a stop comes first.

        `rest` waits for some seconds and returns True if woken by a stop. Raises LaunchError if locks are not
        shared, or no verdict came.
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
        """Return the verdict; None if a stop comes first."""
        until, files = time.monotonic() + PROOF_S, CampaignFiles(self._assignment.directory)
        problem = None
        try:
            self.start()
            while problem is None:
                if rest(POLL_S) or asked_to_stop(files) > 0:
                    return None
                failure = self.failure()  # before the answer is read, because it may come in between
                problem = self._verdict()
                if problem is None and time.monotonic() > until:
                    failure = failure or f"no answer within {PROOF_S:g} s."
                if failure and not problem:
                    remove_file(self._path)
                    about = "two nodes could not test whether they see each other's locks"
                    raise LaunchError(f"{about}: {failure} Or {INSTEAD}")
            return problem
        finally:
            if problem is None:
                with suppress(LaunchError):
                    self.end()


# On the nodes


def prove(directory: Path, rank: int, mark: str, node: str) -> str:
    """Act as one of the two nodes in a directory; the second returns why locks are not shared, or nothing.

    The first locks a file, and releases it once the second has looked. The second cleans up.
    """

    def path(suffix: str) -> Path:
        return directory / f"proof-{mark}{suffix}"

    def can_lock() -> bool:
        with closing(LockFile(str(path(".lock")))) as file:
            return file.try_lock()

    me = {"node": node}
    if rank == 0:
        with locked(path(".lock")):
            write_json(path("-held.json"), me)
            _await(path("-looked.json"))
        write_json(path("-freed.json"), me)
        return ""
    other = str(_await(path("-held.json")).get("node"))
    was_free = can_lock()
    write_json(path("-looked.json"), me)
    _await(path("-freed.json"))
    is_free = can_lock()
    for suffix in (".lock", "-held.json", "-looked.json", "-freed.json"):
        path(suffix).unlink(missing_ok=True)
    if other == node:
        return f"both parts of the test ran on {node}; it needs two nodes"
    if was_free:
        return f"{node} could lock a file in {directory} that {other} had locked"
    still = f"{node} still found a file in {directory} locked after {other} had released it"
    return "" if is_free else still


def _await(path: Path) -> dict[str, object]:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        content = read_json(path)
        if content is not None:
            return content
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
            finding = prove(directory, rank, mark, node)
            problem = problem or finding
    except (LaunchError, RecordsError, OSError) as error:
        problem = str(error)
    if rank == 1 or problem:
        write_json(verdict, {"problem": problem, "by": node, "directories": list(map(str, directories))})
    return EXIT_LAUNCH if problem else EXIT_DONE


if __name__ == "__main__":
    answer, *tested, number, name, here = sys.argv[1:]
    sys.exit(main(Path(answer), list(map(Path, tested)), int(number), name, here))
