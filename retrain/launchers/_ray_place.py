"""What a job of Ray runs on its node: one worker, and then the start of the next run.

`python -m retrain.launchers._ray_place CAMPAIGN RUN_DIR JOB`. A campaign has so many jobs with Ray as it
may have workers. A job that ends hands its place on, so nobody else is needed for the campaign to go on
and there are never more. It does so only while Ray counts the job: after a restart Ray knows nothing of
the jobs before it, and the places are given out anew.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

from retrain.errors import EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED, RetrainError
from retrain.launchers._ray_client import Client
from retrain.launchers._ray_queue import Queue
from retrain.records.layout import CampaignFiles
from retrain.records.stop_request import asked_to_stop

LOOK_S = 1.0  # how often a wish to end the worker at once is looked for


def main(campaign: Path, run: Path, job: str) -> int:
    """Run the worker; gives its exit code, 128 more than the signal that ended it."""
    queue = Queue(campaign)
    try:
        if not queue.wants(job):
            return _say(f"{run}: {job} is not wanted any more; left alone", EXIT_INFRASTRUCTURE)
    except RetrainError as error:
        return _say(str(error), EXIT_INFRASTRUCTURE)
    worker = subprocess.Popen([sys.executable, "-P", "-m", "retrain.worker", str(run)])
    asked: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        asked.append(number)
        worker.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    code = _await(worker, queue, job)
    if not asked and code != EXIT_INTERRUPTED:
        _hand_on(queue, job)
    return code if code >= 0 else 128 - code


def _await(worker: subprocess.Popen[bytes], queue: Queue, job: str) -> int:
    while True:
        try:
            return worker.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            if queue.is_killed(job):
                _kill(worker)


def _kill(worker: subprocess.Popen[bytes]) -> None:
    try:
        family = psutil.Process(worker.pid).children(recursive=True)
    except psutil.Error:
        family = []
    worker.kill()
    for process in family:
        if process.is_running():
            process.kill()


def _hand_on(queue: Queue, job: str) -> None:
    try:
        if asked_to_stop(CampaignFiles(queue.campaign)):
            return
        client = Client()
        mine = client.job(job)
        if mine.status == "RUNNING" and queue.is_ours(mine):
            queue.fill(client, 1)
    except (RetrainError, OSError) as error:  # an orchestrator fills the place, or a later one does
        _say(f"no next run was started from here: {error}", 0)


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
