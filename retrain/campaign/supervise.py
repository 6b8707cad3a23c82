"""Launches runs, notices their ends, retries what may succeed, and stops when asked."""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from retrain.campaign.admission import Admission, WhileRunsSucceed
from retrain.campaign.endings import Ending, conclude, ended_attempts, log_tail
from retrain.campaign.events import Observer
from retrain.campaign.watch import GRACE_S, Active, Patience
from retrain.config.schema import Campaign
from retrain.errors import LaunchError, RecordsError
from retrain.launchers import Ended, Launcher
from retrain.plan.matrix import RunPlan
from retrain.records.layout import RunFiles
from retrain.records.locks import is_held
from retrain.records.run_state import RunState

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
LOOK_S = 1.0  # how often a request to stop is looked for; everything else wakes the loop by itself


@dataclass
class Retry:
    """A run that waits for its next attempt."""

    run: RunPlan
    due: float


class Supervisor:
    """Takes runs to their end, as many at a time as are admitted."""

    def __init__(
        self,
        campaign: Campaign,
        admission: Admission,
        launcher: Launcher,
        files_of: Callable[[str], RunFiles],
        observer: Observer,
        asked_to_stop: Callable[[], int] = lambda: 0,
    ) -> None:
        """Take over; nothing happens yet.

        Args:
            campaign: retries, timeouts, what to do on failure.
            admission: how many workers may run.
            launcher: starts and ends them.
            files_of: where a run's files lie, by run id.
            observer: is told what happens.
            asked_to_stop: looked at every second: 0 no, 1 save and leave, 2 leave now.
        """
        self._campaign = campaign
        self._row = WhileRunsSucceed(admission, campaign.pause_after) if campaign.pause_after else None
        self._admission = self._row or admission
        self._said = ""
        self._launcher = launcher
        self._files_of = files_of
        self._observer = observer
        self._look_for_stop = asked_to_stop
        self._waiting: deque[RunPlan] = deque()
        self._retries: list[Retry] = []
        self._active: dict[str, Active] = {}
        self._attempts: dict[str, int] = {}
        self._next_launch = 0.0
        self._asked_to_stop = 0
        self._stopped = 0
        self._gave_up = False  # after a failure, as on_failure asks
        self.endings: dict[str, Ending] = {}

    def stop(self, *, now: bool = False) -> None:
        """Stop launching and ask workers to save and leave; `now`: end them. For signal handlers."""
        self._asked_to_stop = max(self._asked_to_stop, 2 if now else 1)
        self._launcher.wake()

    @property
    def was_stopped(self) -> bool:
        """Tell whether somebody asked to stop; a stop after a failure is the campaign's own."""
        return self._asked_to_stop > 0 and not self._gave_up

    def supervise(self, runs: Sequence[RunPlan], alive: Sequence[RunPlan] = ()) -> Mapping[str, Ending]:
        """Run everything to its end.

        Args:
            runs: to be launched, in order.
            alive: already running under an earlier orchestrator; their ends are awaited.

        Returns:
            How each run ended; without the runs that were never started.
        """
        self._waiting.extend(runs)
        for run in alive:
            self._adopt(run)
        while self._active or (not self._asked_to_stop and (self._waiting or self._retries)):
            self._obey()
            self._admit()
            self._end_overdue()
            for ended in self._launcher.poll(self._seconds_until_due()):
                self._conclude(ended)
        return self.endings

    def _admit(self) -> None:
        while self._may_launch():
            run = self._next_run()
            if run is None:
                return
            self._next_launch = time.monotonic() + self._campaign.stagger_seconds
            self._attempts[run.run_id] = self._attempts.get(run.run_id, 0) + 1
            self._launch(run)

    def _launch(self, run: RunPlan) -> None:
        files = self._files_of(run.run_id)
        try:
            before = ended_attempts(files)
            self._launcher.submit(run.run_id, files.directory)
        except (LaunchError, RecordsError) as error:
            self._settle(run, Ending(RunState.INFRASTRUCTURE, str(error)))
        else:
            self._activate(run, before)
            if self._row:
                self._row.started()

    def _adopt(self, run: RunPlan) -> None:
        files = self._files_of(run.run_id)
        before = ended_attempts(files)
        self._launcher.adopt(run.run_id, files.directory)
        self._activate(run, before)

    def _may_launch(self) -> bool:
        if self._asked_to_stop or time.monotonic() < self._next_launch:
            return False
        if not self._waiting and not self._retries:
            return False
        places = self._admission.places()
        if len(self._active) < places.count:
            self._said = ""
            return True
        if places.reason and places.reason != self._said:
            self._said = places.reason
            self._observer.notice(f"{places.count} workers at a time for now: {places.reason}")
        return False

    def _next_run(self) -> RunPlan | None:
        due = min(self._retries, key=lambda retry: retry.due, default=None)
        if due is not None and due.due <= time.monotonic():
            self._retries.remove(due)
            return due.run
        return self._waiting.popleft() if self._waiting else None

    def _activate(self, run: RunPlan, before: int) -> None:
        files = self._files_of(run.run_id)
        patience = Patience.begin(self._campaign, files, time.monotonic())
        active = self._active[run.run_id] = Active(run, files, before, patience)
        self._observer.started(run)
        if self._stopped:  # it turned up after everybody was asked to leave
            active.cancelled = RunState.INTERRUPTED
            self._launcher.cancel(run.run_id, now=self._stopped > 1)

    def _conclude(self, ended: Ended) -> None:
        active = self._active.pop(ended.run_id)
        try:
            if is_held(active.files.lock):  # by a dead orchestrator's worker that started late
                self._adopt(active.run)
                return
            ending = conclude(
                active.files, active.run.config_hash, ended.exit_code, active.cancelled, active.before
            )
        except (LaunchError, RecordsError) as error:
            ending = Ending(active.cancelled or RunState.INFRASTRUCTURE, str(error))
        self._settle(active.run, ending)

    def _settle(self, run: RunPlan, ending: Ending) -> None:
        attempts = self._attempts.get(run.run_id, 1)
        if self._row:
            self._row.ended(run.run_id, ending.state, ending.message)
        if ending.is_worth_retrying and attempts <= self._campaign.retries and not self._asked_to_stop:
            delay_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** (attempts - 1)) * random.uniform(0.5, 1.5)
            self._retries.append(Retry(run, time.monotonic() + delay_s))
            self._observer.retrying(run, ending, delay_s)
            return
        self.endings[run.run_id] = ending
        went_wrong = ending.state not in (RunState.DONE, RunState.INTERRUPTED)
        self._observer.ended(run, ending, log_tail(self._files_of(run.run_id)) if went_wrong else ())
        if went_wrong and self._campaign.on_failure == "stop" and not self._asked_to_stop:
            self._observer.notice('on_failure = "stop": the other runs are asked to save and leave')
            self._asked_to_stop, self._gave_up = 1, True

    def _obey(self) -> None:
        self._asked_to_stop = max(self._asked_to_stop, self._look_for_stop())
        if self._stopped == self._asked_to_stop:
            return
        self._stopped = self._asked_to_stop
        for run_id, active in self._active.items():
            active.cancelled = active.cancelled or RunState.INTERRUPTED
            self._launcher.cancel(run_id, now=self._stopped > 1)

    def _end_overdue(self) -> None:
        now_s = time.monotonic()
        for run_id, active in self._active.items():
            if active.kill_at_s <= now_s:
                self._launcher.cancel(run_id, now=True)
                active.kill_at_s = math.inf
            elif active.cancelled is None:
                active.cancelled = active.patience.ended_by(now_s)
                if active.cancelled is not None:
                    self._launcher.cancel(run_id, now=False)
                    active.kill_at_s = now_s + GRACE_S

    def _seconds_until_due(self) -> float:
        now_s = time.monotonic()
        dues = [now_s + LOOK_S, *(active.due_s() for active in self._active.values())]
        if not self._asked_to_stop and (self._waiting or self._retries):
            dues += self._launches_due(now_s)
        return max(0.0, min(dues) - now_s)

    def _launches_due(self, now: float) -> list[float]:
        places = self._admission.places()
        if len(self._active) >= places.count:
            return [now + places.ask_again_s] if places.ask_again_s is not None else []
        dues = [max(retry.due, self._next_launch) for retry in self._retries]
        return dues + ([self._next_launch] if self._waiting else [])
