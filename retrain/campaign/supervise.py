"""The scheduler: launches runs, notices their ends, retries them, stops when asked. The retry policy:

- Which: infrastructure failures and stalls, unless only the user can fix the cause, and runs that the cluster
  cut short (time limit, lost node). Never the run's own failure, a run timeout, or a stop.
- How often: `[campaign].retries` times per run and orchestrator. An attempt that the cluster cut short after
  it had saved progress does not count; a run has at most as many of those as steps.
- After how long: exponential backoff with jitter.
- Pause: after `[campaign].pause_after` runs in a row failed for infrastructure, a circuit breaker opens.
- Submission: runs that a cluster did not accept are submitted again after SUBMIT_AGAIN_S, as often as it
  takes; that is no attempt. A cluster that does not answer the first submission fails the launch.

Attempts are counted from the run's files: a cluster may start a task twice, and a task that finds its run
locked leaves no trace. What counts is attempts that were written down, and launches that wrote none.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from retrain.base.errors import ClusterDownError, LaunchError, RecordsError, may_pass
from retrain.base.locks import RENEW_S, is_held
from retrain.base.user_code import names_place
from retrain.campaign import Observer
from retrain.campaign.admission import Admits, Places
from retrain.campaign.endings import (
    GRACE_S,
    Active,
    Ending,
    Patience,
    conclude,
    ended_attempts,
    ending_by,
    log_tail,
)
from retrain.campaign.launchers import Begun, Ended, Launcher
from retrain.config.schema import CampaignSection
from retrain.control.rules.breaker import CircuitBreaker
from retrain.plan.matrix import RunPlan
from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.run_state import API_PAUSED, RunState, read_attempts, read_progress
from retrain.records.rungs import is_waiting
from retrain.records.text import count_of

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
SUBMIT_AGAIN_S = 10.0  # until runs that a cluster did not accept are submitted again
SAME_LOSS_S = 2 * RENEW_S  # workers lost with one machine are noticed as their leases expire, one by one

FIGURES = re.compile(r"\d[\d.]*")  # in a reason; they differ from one look to the next
POLL_S = 1.0  # between checks of stop.json, timeouts, retries and admission; a worker's end ends it


class Supervisor:
    """Runs everything to its end, as many workers at a time as are admitted."""

    def __init__(
        self,
        campaign: CampaignSection,  # retries, timeouts, what to do on failure
        admission: Admits,
        launcher: Launcher,
        files_of: Callable[[str], RunFiles],  # by run id
        observer: Observer,
        asked_to_stop: Callable[[], int] = lambda: 0,  # each second: 0 no, 1 save and leave, 2 leave now
        ask_workers: Callable[[bool], None] = lambda now: None,  # to stop, without a silent cluster
        clock: Callable[[], float] = time.monotonic,  # of all waits
    ) -> None:
        """Prepare; nothing happens yet."""
        self._campaign, self._clock = campaign, clock
        self._admission = admission
        self._breaker = CircuitBreaker(campaign.pause_after, SAME_LOSS_S)
        self._said = ""
        self._launcher = launcher
        self._files_of = files_of
        self._observer = observer
        self._poll = asked_to_stop
        self._ask_workers = ask_workers
        self._waiting: deque[RunPlan] = deque()
        self._retries = RetryPolicy(campaign.retries, clock)
        self._active: dict[str, Active] = {}
        self._was_taken = False  # the cluster has accepted runs before, so its silence is temporary
        self._before: dict[str, int] = {}  # of waiting runs: the newest attempt that has ended
        self._next_launch = 0.0
        self._pause_s = POLL_S
        self._asked_to_stop = self._stopped = 0
        self._gave_up = False  # after a failure, as on_failure asks
        self.endings: dict[str, Ending] = {}

    def stop(self, *, now: bool = False) -> None:
        """Stop launching and ask workers to save and leave; `now`: kill them. Safe in a signal handler."""
        self._asked_to_stop = max(self._asked_to_stop, 2 if now else 1)
        self._launcher.wake()

    @property
    def was_stopped(self) -> bool:
        """Whether the user asked to stop; a stop after a failure is the campaign's own."""
        return self._asked_to_stop > 0 and not self._gave_up

    @property
    def is_stopping(self) -> bool:
        """Whether nothing more is launched."""
        return self._asked_to_stop > 0

    @property
    def is_over(self) -> bool:
        return not self._active

    def supervise(self, runs: Sequence[RunPlan], alive: Sequence[RunPlan] = ()) -> Mapping[str, Ending]:
        """Run everything to its end, and return how each run ended, without those that were never started.

        `alive` runs are running, or queued, under an earlier orchestrator; `runs` are launched in order.
        After a LaunchError (the cluster refuses) what it has accepted continues.
        """
        self._waiting.extend(runs)
        self._note_attempts(alive)
        self._launcher.adopt([run.run_id for run in alive])
        self._was_taken = self._was_taken or bool(alive)
        for run in alive:
            self._activate(run)
            if not self._launcher.queues or is_held(self._files_of(run.run_id).lock):
                self._begin(run.run_id)
        while self._active or (not self._asked_to_stop and (self._waiting or self._retries)):
            self._pause_s = POLL_S
            self._obey()
            self._admit()
            now_s = self._clock()
            for run_id, active in self._active.items():
                if active.kill_at_s <= now_s:
                    self._launcher.cancel([run_id], now=True)
                    active.kill_at_s = math.inf
                elif active.patience is not None and active.cancelled is None:
                    active.cancelled = active.patience.ended_by(now_s)
                    if active.cancelled is not None:
                        self._launcher.cancel([run_id], now=False)
                        active.kill_at_s = now_s + GRACE_S
            for happened in self._launcher.poll(self._pause_s):
                if isinstance(happened, Begun):
                    self._begin(happened.run_id)
                else:
                    self._conclude(happened)
        return self.endings

    def _admit(self) -> None:
        if self._launcher.queues:
            self._hand_over()
            return
        while self._may_launch():
            run = self._retries.pop_due() or (self._waiting.popleft() if self._waiting else None)
            if run is None:
                return
            self._next_launch = self._clock() + self._campaign.stagger_seconds
            try:
                self._launch([run])
            except (LaunchError, RecordsError) as error:
                self._retry_or_end(run, ending_by(error))
            self._obey()  # `submit` may take long: `inline` runs its workers in it

    def _hand_over(self) -> None:
        """Submit all waiting runs at once, and retries when they would not wait in the cluster's queue."""
        if not self._may_launch():
            return
        is_probe = self._breaker.ask(self._clock()).is_probe
        most = 1 if is_probe else len(self._waiting) + len(self._retries)
        runs = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
        room = min(most, self._places().count - len(self._active))
        while len(runs) < room and (run := self._retries.pop_due()) is not None:
            runs.append(run)
        batch = []
        for run in runs:
            try:
                self._note_attempts([run])
                batch.append(run)
            except RecordsError as error:  # does not hold up the others
                self._retry_or_end(run, ending_by(error))
        if not batch:
            return
        try:
            taken = self._launch(batch)
        except (ClusterDownError, RecordsError) as error:
            if not self._was_taken or (isinstance(error, RecordsError) and not may_pass(error)):
                raise
            if self._said != str(error):
                self._observer.notice(f"{error}; {count_of(len(batch), 'run')} will wait for it")
            self._said, taken = str(error), frozenset()
        self._waiting.extend(run for run in batch if run.run_id not in taken)
        if self._waiting:
            self._next_launch = self._clock() + SUBMIT_AGAIN_S

    def _launch(self, runs: Sequence[RunPlan]) -> Collection[str]:
        self._note_attempts(runs)  # first: a worker may have begun when `submit` returns
        taken = self._launcher.submit([run.run_id for run in runs])
        self._was_taken, self._said = True, ""
        for run in runs:
            if run.run_id in taken:
                self._breaker.launched(run.run_id)
                self._activate(run)
                if not self._launcher.queues:
                    self._begin(run.run_id)
        return taken

    def _note_attempts(self, runs: Iterable[RunPlan]) -> None:
        """Note which attempts had ended before runs' workers begin; once, however long the runs wait."""
        for run in (run for run in runs if run.run_id not in self._before):
            files = self._files_of(run.run_id)
            self._retries.launched(run.run_id, files)
            self._before[run.run_id] = ended_attempts(files)

    def _may_launch(self) -> bool:
        if self._asked_to_stop or not (self._waiting or self._retries):
            return False
        if (wait_s := self._next_launch - self._clock()) > 0:
            self._pause_s = min(POLL_S, wait_s)
            return False
        places = self._places()
        # a cluster with a queue keeps its own count; only a pause applies to it
        if places.count > (0 if self._launcher.queues else len(self._active)):
            return True
        gist = FIGURES.sub("", places.reason)
        if gist and gist != self._said:
            self._said = gist
            few = f"{count_of(places.count, 'worker')} at a time for now"
            self._observer.notice(f"{few if places.count else 'no run is started for now'}: {places.reason}")
        return False

    def _places(self) -> Places:
        """Return how many workers may run now: none while the breaker is open."""
        verdict = self._breaker.ask(self._clock())
        return Places(0, verdict.reason) if verdict.is_open else self._admission()

    def _activate(self, run: RunPlan) -> None:
        files, before = self._files_of(run.run_id), self._before.pop(run.run_id)
        active = self._active[run.run_id] = Active(run, files, before)
        if self._stopped:  # accepted after the stop
            active.cancelled = RunState.INTERRUPTED
            self._launcher.cancel([run.run_id], now=self._stopped > 1)

    def _begin(self, run_id: str) -> None:
        active, workers = self._active.get(run_id), self._active.values()
        if active is not None and active.patience is None:
            active.patience = Patience(
                self._campaign,
                active.files,
                self._clock(),
                lambda: any(other.patience and other.patience.is_in((API_PAUSED,)) for other in workers),
            )
            self._breaker.started(self._clock(), run_id)
            self._observer.started(active.run)

    def _conclude(self, ended: Ended) -> None:
        active = self._active.pop(ended.run_id)
        why = ended.why if active.cancelled is None else ""
        if ended.taken_back:
            active.cancelled = active.cancelled or RunState.INTERRUPTED
        try:
            if is_held(active.files.lock):  # by a late worker of a dead orchestrator
                self._launcher.adopt([ended.run_id])
                self._active[ended.run_id] = active
                if active.cancelled is not None:  # only the worker that has just ended was asked
                    self._launcher.cancel([ended.run_id], now=self._stopped > 1)
                return
            config_hash, before = active.run.config_hash, active.before
            ending = conclude(active.files, config_hash, ended.exit_code, active.cancelled, before, why)
        except (LaunchError, RecordsError) as error:
            ending = Ending(active.cancelled, str(error)) if active.cancelled else ending_by(error)
        cut_short = ended.cut_short and active.cancelled is None and not is_waiting(active.files)
        self._retry_or_end(active.run, ending, cut_short=cut_short, is_lost=ended.is_lost)

    def _retry_or_end(
        self, run: RunPlan, ending: Ending, *, cut_short: bool = False, is_lost: bool = False
    ) -> None:
        if ending.state is RunState.INTERRUPTED:  # which says nothing
            self._breaker.withdrawn(run.run_id)
        else:
            failed = ending.state is RunState.INFRASTRUCTURE
            self._breaker.ended(
                self._clock(), run.run_id, infrastructure=failed, is_lost=is_lost, message=ending.message
            )
        files, delay_s = self._files_of(run.run_id), None
        if not self._asked_to_stop:
            delay_s = self._retries.ended(run, ending, files, cut_short=cut_short)
        if delay_s is None:
            self._end(run, ending)
        else:
            self._observer.retrying(run, ending, delay_s)

    def _end(self, run: RunPlan, ending: Ending) -> None:
        self.endings[run.run_id] = ending
        went_wrong = ending.state not in (RunState.DONE, RunState.INTERRUPTED)
        is_unclear = went_wrong and not names_place(ending.message)
        tail = log_tail(self._files_of(run.run_id)) if is_unclear else []
        self._observer.ended(run, ending, tail if tail != [ending.message] else ())
        if went_wrong and self._campaign.on_failure == "stop" and not self._asked_to_stop:
            self._observer.notice('on_failure = "stop": asking the other runs to save and leave')
            self._asked_to_stop, self._gave_up = 1, True

    def _obey(self) -> None:
        self._asked_to_stop = max(self._asked_to_stop, self._poll())
        if self._stopped == self._asked_to_stop:
            return
        self._stopped = self._asked_to_stop
        for active in self._active.values():
            active.cancelled = active.cancelled or RunState.INTERRUPTED
        if self._launcher.queues:  # its tasks may start after we have exited
            self._ask_workers(self._stopped > 1)
        self._launcher.cancel(list(self._active), now=self._stopped > 1)


class RetryPolicy:
    """Decides on retries, and keeps the runs that wait for theirs."""

    def __init__(self, retries: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._retries = retries
        self._clock = clock
        self._counts: dict[str, _Count] = {}
        self._waiting: list[tuple[float, RunPlan]] = []  # due on the clock

    def __len__(self) -> int:
        return len(self._waiting)

    def launched(self, run_id: str, files: RunFiles) -> None:
        """Note that a worker is launched, or was found alive."""
        newest = _newest(files)
        self._counts.setdefault(run_id, _Count(newest, newest)).launched_at = newest

    def ended(
        self, run: RunPlan, ending: Ending, files: RunFiles, *, cut_short: bool = False
    ) -> float | None:
        """Count an attempt, and return the delay in seconds until the next; None: the ending is final."""
        count = self._counts.setdefault(run.run_id, _Count(0, 0))
        newest = readable(_newest, files)
        newest = count.launched_at if newest is None else newest
        if newest <= count.launched_at:
            count.traceless += 1
        is_free = False  # an interrupted attempt that saved a step which it had not resumed from
        if cut_short and ending.state is RunState.INTERRUPTED:
            tried, progress = readable(read_attempts, files.attempts), readable(read_progress, files.status)
            if tried and progress is not None and progress.attempt == tried[-1].number:
                is_free = progress.step > tried[-1].resumed_from_step
        count.free += is_free
        attempts = newest - count.first + count.traceless - count.free
        if ending.state is RunState.DONE or (ending.state is RunState.INTERRUPTED and not cut_short):
            del self._counts[run.run_id]  # it may go on later: at a rung, or with further questions
            return None
        if not is_retried(ending, cut_short=cut_short) or (attempts > self._retries and not is_free):
            return None
        doubled = FIRST_RETRY_S * 2.0 ** max(0, attempts - 1)
        delay_s = min(LONGEST_RETRY_S, doubled) * random.uniform(0.5, 1.5)
        self._waiting.append((self._clock() + delay_s, run))
        return delay_s

    def pop_due(self) -> RunPlan | None:
        due = min(self._waiting, key=lambda waiting: waiting[0], default=None)
        if due is None or due[0] > self._clock():
            return None
        self._waiting.remove(due)
        return due[1]


def is_retried(ending: Ending, *, cut_short: bool) -> bool:
    """Whether an ending may be retried; `cut_short`: the cluster ended the attempt for reasons of its own."""
    if ending.state is RunState.INTERRUPTED:
        return cut_short
    return ending.state in (RunState.INFRASTRUCTURE, RunState.STALLED) and not ending.is_lasting


@dataclass
class _Count:
    """A run's attempts under this orchestrator."""

    first: int  # newest attempt before the first launch
    launched_at: int  # newest attempt before the last launch
    traceless: int = 0  # launches that wrote no attempt
    free: int = 0  # attempts that do not count


def _newest(files: RunFiles) -> int:
    return max((attempt.number for attempt in read_attempts(files.attempts)), default=0)
