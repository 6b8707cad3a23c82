"""What a job of Ray runs on its node: a worker, and then the start of the next run.

`python -m retrain.launchers._ray_place CAMPAIGN JOB`. A campaign has so many jobs with Ray as it
may have workers. A job that ends hands its place on, so nobody else is needed for the campaign to go on
and there are never more. It does so only while Ray counts the job: after a restart Ray knows nothing of
the jobs before it, and the places are given out anew.

A job costs Ray seconds. So one whose run took less than that (`share_seconds`) goes on with the next run
itself, a worker process for each, and asks Ray nothing.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from retrain.errors import EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED, RetrainError
from retrain.launchers._ray_client import Client
from retrain.launchers._ray_marks import SETTLED
from retrain.launchers._ray_queue import Queue, Terms
from retrain.locks.held import is_held
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.stop_request import asked_to_stop

LOOK_S = 1.0  # how often a wish to end the worker at once is looked for


class Place:
    """One job's share of a campaign."""

    def __init__(self, queue: Queue, job: str, terms: Terms) -> None:
        self._queue = queue
        self._job = job
        self._terms = terms
        self._worker: subprocess.Popen[bytes] | None = None
        self._was_asked = False  # to leave
        self._is_noted = True
        self._neighbours = Neighbours(queue, job, terms.look_s)

    def leave(self, number: int, frame: object) -> None:
        """Pass a signal on; the job ends with its worker."""
        self._was_asked = True
        if self._worker is not None:
            self._worker.send_signal(number)

    def work(self, run_id: str, number: int) -> int:
        """Do a run, and short ones after it; gives the last worker's exit code."""
        while True:
            began = time.monotonic()
            code = self._do(run_id, number)
            if not self._may_go_on(code) or time.monotonic() - began >= self._terms.share_s:
                break
            following = self._next()
            if following is None:
                break
            run_id, number = following
        if not self._was_asked and code != EXIT_INTERRUPTED:
            self._neighbours.look_last()
            self._hand_on()
        return code

    def _may_go_on(self, code: int) -> bool:
        return code in SETTLED and self._is_noted and not self._was_asked

    def _do(self, run_id: str, number: int) -> int:
        run = self._queue.directory_of(run_id)
        with RunFiles(run).output_log.open("ab") as log:
            command = [sys.executable, "-P", "-m", "retrain.worker", str(run)]
            self._worker = subprocess.Popen(command, stdout=log, stderr=log)
        if self._was_asked:  # before there was a worker to tell
            self._worker.send_signal(signal.SIGTERM)
        code = self._await(self._worker, run_id, number)
        self._worker = None
        try:
            self._queue.marks.note_exit(run_id, number, code)
        except RetrainError as error:  # then the end of this job tells
            _say(error, 0)
            self._is_noted = False
        return code

    def _await(self, worker: subprocess.Popen[bytes], run_id: str, number: int) -> int:
        while True:
            try:
                return worker.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                if self._queue.is_killed(run_id, number):
                    _kill(worker)
                self._neighbours.look_in_time()

    def _next(self) -> tuple[str, int] | None:
        """Take the next run on, if there is one."""
        try:
            for run_id, number in self._queue.untaken():
                if not self._queue.marks.take(run_id, number, self._job):
                    continue
                is_wanted = self._queue.wants(self._queue.id_of(run_id, number))
                if is_wanted and not self._queue.is_retired(self._job):  # asked after the mark was made, so
                    return run_id, number  # that either side sees what the other has written
                self._queue.marks.give_back(run_id, number)
                break
        except RetrainError as error:
            _say(f"no next run was started from here: {error}", 0)
        return None

    def _hand_on(self) -> None:
        try:
            if asked_to_stop(CampaignFiles(self._queue.campaign)) or not any(self._queue.untaken()):
                return
            client = Client()
            mine = client.job(self._job)
            if mine.status == "RUNNING" and self._queue.is_ours(mine):
                self._queue.fill(client, 1)
        except RetrainError as error:  # an orchestrator fills the place, or a later one does
            _say(f"no next run was started from here: {error}", 0)


class Neighbours:
    """Has lost jobs replaced while no orchestrator does: at most once per period, by one job of them all."""

    def __init__(self, queue: Queue, job: str, period_s: float) -> None:
        self._queue = queue
        self._job = job
        self._period_s = period_s
        self._sign = queue.home / "looked-after"
        self._looking: subprocess.Popen[bytes] | None = None
        self._look_at = time.monotonic() + period_s

    def look_in_time(self) -> None:
        """Look if a period has passed here and anywhere."""
        is_looking = self._looking is not None and self._looking.poll() is None
        if time.monotonic() >= self._look_at and not is_looking:
            self._look_at = time.monotonic() + self._period_s
            self._look()

    def look_last(self) -> None:
        """Look if a period has passed anywhere, or if nobody else will later."""
        try:
            self._look(is_last=self._queue.leaves_only_lost())
        except RetrainError as error:
            _say(error, 0)
        if self._looking is not None:
            self._looking.wait()

    def _look(self, *, is_last: bool = False) -> None:
        campaign = CampaignFiles(self._queue.campaign)
        try:
            if asked_to_stop(campaign) or is_held(campaign.lock):
                return
            if self._has_somebody_looked() and not is_last:
                return
            self._sign.touch()
        except (RetrainError, OSError) as error:
            _say(error, 0)
            return
        # a process of its own: the library takes 100 MB that the worker may need
        command = [sys.executable, "-P", "-m", "retrain.launchers._ray_repair"]
        self._looking = subprocess.Popen([*command, str(self._queue.campaign), self._job])

    def _has_somebody_looked(self) -> bool:
        # another machine's clock may be ahead; then each looks at its own pace
        return self._sign.exists() and abs(time.time() - self._sign.stat().st_mtime) < self._period_s


def main(campaign: Path, job: str) -> int:
    """Do the work of a job; gives an exit code, 128 more than the signal that ended the last worker."""
    queue = Queue(campaign)
    try:
        named = queue.parse(job)
        if named is None or not queue.wants(job):
            return _say(f"{job} is not wanted any more; left alone", EXIT_INFRASTRUCTURE)
        place = Place(queue, job, queue.terms())
        queue.marks.take(*named, job)  # whoever submitted this job has; unless he was somebody else
    except RetrainError as error:
        return _say(error, EXIT_INFRASTRUCTURE)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, place.leave)
    code = place.work(*named)
    return code if code >= 0 else 128 - code


def _kill(worker: subprocess.Popen[bytes]) -> None:
    try:
        family = psutil.Process(worker.pid).children(recursive=True)
    except psutil.Error:
        family = []
    worker.kill()
    for process in family:
        if process.is_running():
            process.kill()


def _say(what: object, code: int) -> int:
    print(what, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
