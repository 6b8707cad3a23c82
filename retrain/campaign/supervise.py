"""Launches runs, notices their ends, retries what may succeed, and stops when asked."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.campaign.admission import Admission
from retrain.campaign.endings import Ending, conclude, log_tail
from retrain.campaign.events import Observer
from retrain.config.schema import Campaign
from retrain.errors import LaunchError
from retrain.launchers import Ended, Launcher
from retrain.plan.matrix import RunPlan
from retrain.records.layout import RunFiles
from retrain.records.run_state import RunState

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
GRACE_S = 30.0  # to save a checkpoint after run_timeout, before the worker is killed
IDLE_S = 3600.0  # with nothing due, only ends and signals wake the loop


@dataclass
class Active:
    """A worker that is running."""

    run: RunPlan
    deadline: float | None
    cancelled: RunState | None = None


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
        directory_of: Callable[[RunPlan], Path],
        observer: Observer,
    ) -> None:
        self._campaign = campaign
        self._admission = admission
        self._said = ""
        self._launcher = launcher
        self._directory_of = directory_of
        self._observer = observer
        self._waiting: deque[RunPlan] = deque()
        self._retries: list[Retry] = []
        self._active: dict[str, Active] = {}
        self._attempts: dict[str, int] = {}
        self._next_launch = 0.0
        self._asked_to_stop = 0
        self._stopped = 0
        self.endings: dict[str, Ending] = {}

    def stop(self, *, now: bool = False) -> None:
        """Stop launching and ask workers to save and leave; `now`: end them. For signal handlers."""
        self._asked_to_stop = max(self._asked_to_stop, 2 if now else 1)
        self._launcher.wake()

    @property
    def was_stopped(self) -> bool:
        """Tell whether somebody asked to stop."""
        return self._asked_to_stop > 0

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
            self._launcher.adopt(run.run_id, self._directory_of(run))
            self._activate(run)
        while self._active or (not self._asked_to_stop and (self._waiting or self._retries)):
            self._obey()
            self._admit()
            self._enforce_deadlines()
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
            try:
                self._launcher.submit(run.run_id, self._directory_of(run))
            except LaunchError as error:
                self._settle(run, Ending(RunState.INFRASTRUCTURE, str(error)))
            else:
                self._activate(run)

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

    def _activate(self, run: RunPlan) -> None:
        timeout_s = self._campaign.run_timeout
        self._active[run.run_id] = Active(run, time.monotonic() + timeout_s if timeout_s else None)
        self._observer.started(run)

    def _conclude(self, ended: Ended) -> None:
        active = self._active.pop(ended.run_id)
        files = RunFiles(self._directory_of(active.run))
        self._settle(active.run, conclude(files, active.run.config_hash, ended.exit_code, active.cancelled))

    def _settle(self, run: RunPlan, ending: Ending) -> None:
        attempts = self._attempts.get(run.run_id, 1)
        if ending.is_worth_retrying and attempts <= self._campaign.retries and not self._asked_to_stop:
            delay_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** (attempts - 1)) * random.uniform(0.5, 1.5)
            self._retries.append(Retry(run, time.monotonic() + delay_s))
            self._observer.retrying(run, ending, delay_s)
            return
        self.endings[run.run_id] = ending
        went_wrong = ending.state not in (RunState.DONE, RunState.INTERRUPTED)
        self._observer.ended(run, ending, log_tail(RunFiles(self._directory_of(run))) if went_wrong else ())
        if went_wrong and self._campaign.on_failure == "stop" and not self._asked_to_stop:
            self._observer.notice('on_failure = "stop": the other runs are asked to save and leave')
            self._asked_to_stop = 1

    def _obey(self) -> None:
        if self._stopped == self._asked_to_stop:
            return
        self._stopped = self._asked_to_stop
        for run_id, active in self._active.items():
            active.cancelled = active.cancelled or RunState.INTERRUPTED
            self._launcher.cancel(run_id, now=self._stopped > 1)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for run_id, active in self._active.items():
            if active.deadline is not None and active.deadline <= now:
                self._launcher.cancel(run_id, now=active.cancelled is RunState.TIMEOUT)
                active.cancelled = RunState.TIMEOUT
                active.deadline = now + GRACE_S

    def _seconds_until_due(self) -> float:
        now = time.monotonic()
        dues = [a.deadline for a in self._active.values() if a.deadline is not None]
        if not self._asked_to_stop and (self._waiting or self._retries):
            dues += self._launches_due(now)
        return max(0.0, min((due - now for due in dues), default=IDLE_S))

    def _launches_due(self, now: float) -> list[float]:
        places = self._admission.places()
        if len(self._active) >= places.count:
            return [now + places.ask_again_s] if places.ask_again_s is not None else []
        dues = [max(retry.due, self._next_launch) for retry in self._retries]
        return dues + ([self._next_launch] if self._waiting else [])
