"""The retry policy: which ending is retried, how often, after how long, and when launching pauses.

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

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from retrain.base.locks import RENEW_S
from retrain.campaign.admission import Admits, Places
from retrain.campaign.endings import Ending
from retrain.control.rules.breaker import CircuitBreaker
from retrain.plan.matrix import RunPlan
from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.run_state import RunState, read_attempts, read_progress

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
SUBMIT_AGAIN_S = 10.0  # until runs that a cluster did not accept are submitted again
SAME_LOSS_S = 2 * RENEW_S  # workers lost with one machine are noticed as their leases expire, one by one


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
        count.traceless += _newest_known(files, count) <= count.launched_at
        is_free = cut_short and _has_progressed(ending, files)
        count.free += is_free
        attempts = _newest_known(files, count) - count.first + count.traceless - count.free
        if ending.state is RunState.INTERRUPTED and not cut_short:
            del self._counts[run.run_id]  # it may go on later, as a run that waits in a search
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


class LaunchBreaker:
    """Pauses launches when several runs in a row fail for infrastructure; then admits one, as a probe.

    A run counts once, however often it was retried. Runs that are lost with one machine count as one.
    """

    def __init__(self, inner: Admits, runs: int, clock: Callable[[], float]) -> None:
        """Start closed; `runs` failures in a row open it, 0: never. `inner` decides while it is closed."""
        self._inner = inner
        self._breaker = CircuitBreaker(runs or sys.maxsize)
        self._clock = clock
        self._failed: set[str] = set()
        self._same_loss_until_s = float("-inf")

    def places(self) -> Places:
        """Return no place while the breaker is open."""
        verdict = self._breaker.ask(self._clock())
        return Places(0, verdict.reason) if verdict.is_open else self._inner()

    def wants_probe(self) -> bool:
        """Whether one run is to be started before any others."""
        return self._breaker.ask(self._clock()).is_probe

    def launched(self, run_id: str) -> None:
        self._breaker.launched(run_id)

    def started(self, run_id: str) -> None:
        self._breaker.started(self._clock(), run_id)

    def ended(self, run_id: str, ending: Ending, *, is_lost: bool = False) -> None:
        """Note how a worker ended (`is_lost`: with its machine); an interruption says nothing."""
        is_probe = run_id == self._breaker.probe
        if ending.state is RunState.INTERRUPTED:
            self._breaker.withdrawn(run_id)
            return
        if run_id in self._failed and not is_probe:
            return
        is_infrastructure = ending.state is RunState.INFRASTRUCTURE
        if is_lost and is_infrastructure and not is_probe:
            if self._clock() < self._same_loss_until_s:
                return
            self._same_loss_until_s = self._clock() + SAME_LOSS_S
        has_opened = self._breaker.ended(
            self._clock(), run_id, infrastructure=is_infrastructure, message=ending.message
        )
        if is_infrastructure and not has_opened:
            self._failed.add(run_id)
        else:
            self._failed.clear()  # a new row begins; after a pause the probe counts, whichever run it is


def _has_progressed(ending: Ending, files: RunFiles) -> bool:
    """Whether an interrupted attempt saved a step that it had not resumed from."""
    attempts, progress = readable(read_attempts, files.attempts), readable(read_progress, files.status)
    if ending.state is not RunState.INTERRUPTED or not attempts or progress is None:
        return False
    return progress.attempt == attempts[-1].number and progress.step > attempts[-1].resumed_from_step


def _newest(files: RunFiles) -> int:
    return max((attempt.number for attempt in read_attempts(files.attempts)), default=0)


def _newest_known(files: RunFiles, count: _Count) -> int:
    newest = readable(_newest, files)
    return count.launched_at if newest is None else newest
