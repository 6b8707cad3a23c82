"""Replaces jobs that Ray has lost, while no orchestrator does: a look of one job at its neighbours.

`python -m retrain.launchers._ray_repair CAMPAIGN JOB`. A job is lost if its node was, or if Ray found no
room for it in time; its run is given a job with the next number. So each lost job has one successor, whose
id Ray takes once, and there are never more jobs than before. What became of a run whose worker left is
left to the next orchestrator.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from retrain.errors import RetrainError
from retrain.launchers._ray_client import BY_COMMAND, NO_ROOM, Client, Job
from retrain.launchers._ray_queue import Queue
from retrain.launchers.asking import LEAST_POLL_S
from retrain.records.attempts import read_attempts
from retrain.records.layout import RunFiles

PATIENCE_S = 60.0  # what Ray takes at most to notice that a node is gone
MOST_LOST = 3  # lives of one run that ended without a word: perhaps it is the run that ends its nodes


def replace_lost(queue: Queue, client: Client, job: str) -> tuple[list[str], list[str]]:
    """Submit what is lost again.

    Args:
        queue: the campaign's.
        client: of the cluster.
        job: who asks; if Ray does not count it, Ray was started anew, and nothing is done.

    Returns:
        The runs that were submitted, and those that may be lost: Ray says that they are worked on, and
        nobody does.

    Raises:
        EngineDownError: the cluster does not answer.
        LaunchError: it refuses.
        RecordsError: files cannot be read or written.
    """
    jobs = {found.id: found for found in client.jobs() if queue.is_ours(found)}
    replaced: list[str] = []
    doubtful: list[str] = []
    if job not in jobs or jobs[job].is_over:
        return replaced, doubtful
    ask = queue.terms().ask
    for run_id, number, theirs in _without_a_worker(queue, jobs):
        if theirs.id == job:
            continue
        if not theirs.is_over:
            doubtful.append(run_id)
        elif _is_lost(queue, run_id, theirs) and queue.submit(client, run_id, number + 1, ask):
            replaced.append(run_id)
    return replaced, doubtful


def _without_a_worker(queue: Queue, jobs: Mapping[str, Job]) -> Iterator[tuple[str, int, Job]]:
    """Return the wanted runs that nobody works on though a job has taken them on, with its newest number."""
    newest = queue.marks.newest()
    for run_id, number in queue.wanted().items():
        last = newest.get(run_id, 0)
        taken = queue.marks.read(run_id, last) if last >= number else None
        job = jobs.get(taken.job) if taken is not None and taken.exit_code is None else None
        if job is not None and not job.waits and not queue.is_alive(run_id):
            yield run_id, last, job


def _is_lost(queue: Queue, run_id: str, job: Job) -> bool:
    files = RunFiles(queue.directory_of(run_id))
    if job.status != "FAILED" or job.error == BY_COMMAND or files.done.exists():
        return False
    lost = sum(attempt.ending is None for attempt in read_attempts(files.attempts))
    return job.error == NO_ROOM or lost <= MOST_LOST


def main(campaign: Path, job: str) -> int:
    """Look until Ray knows what became of all jobs; gives an exit code."""
    queue, client = Queue(campaign), Client()
    until = time.monotonic() + PATIENCE_S
    try:
        doubtful = [""]
        while doubtful and time.monotonic() < until:
            replaced, doubtful = replace_lost(queue, client, job)
            for run_id in replaced:
                print(f"the job of {run_id} was lost; it was submitted again", file=sys.stderr, flush=True)
            if doubtful:
                time.sleep(LEAST_POLL_S)
    except RetrainError as error:
        print(f"lost jobs could not be looked for: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
