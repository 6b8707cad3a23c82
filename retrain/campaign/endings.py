"""The end of a worker: the watchdog that ends it, and how its end is interpreted.

The watchdog applies `run_timeout`, `stall_timeout`, and the grace period after either. A stall is judged on a
monotonic clock by the size of metrics.jsonl and warmup.jsonl, one of which grows with every step: a `stat` of
each, no reading, no timestamps. An end is interpreted by the run's files first, by the exit code second.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from retrain.base.errors import (
    EXIT_CONFIG,
    EXIT_INFRASTRUCTURE,
    EXIT_INTERRUPTED,
    EXIT_RECORDS,
    EXIT_RUN_FAILED,
    RecordsError,
    RetrainError,
    may_pass,
)
from retrain.base.locks import holder, is_held
from retrain.config.schema import CampaignSection
from retrain.plan.matrix import RunPlan
from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.lines import number_in
from retrain.records.metrics import read_ends
from retrain.records.run_row import last_output
from retrain.records.run_state import (
    ENDINGS,
    PAUSED,
    Attempt,
    Progress,
    RunState,
    end_attempt,
    read_attempts,
    read_done,
    read_progress,
)
from retrain.records.text import plain

TAIL_LINES = 12
LIMITS = {
    RunState.STALLED: "no step within [campaign].stall_timeout",
    RunState.TIMEOUT: "not done within [campaign].run_timeout",
}
LONGEST_MESSAGE = 300  # characters of an error that an event line shows


@dataclass(frozen=True)
class Ending:
    """What a run's attempt came to, and why."""

    state: RunState
    message: str = ""
    is_lasting: bool = False  # until the user does what the message says
    took_s: float | None = field(default=None, compare=False)  # the attempt, as its worker measured it


def ending_by(error: RetrainError) -> Ending:
    """Return the ending for an error in starting a worker or reading its end."""
    is_lasting = isinstance(error, RecordsError) and not may_pass(error)
    return Ending(RunState.INFRASTRUCTURE, str(error), is_lasting)


def ended_attempts(files: RunFiles) -> int:
    """Return the number of the newest attempt that has ended; a new worker's comes after it."""
    attempts = read_attempts(files.attempts)
    return max((attempt.number for attempt in attempts if attempt.ending is not None), default=0)


def conclude(
    files: RunFiles,
    config_hash: str,
    exit_code: int | None,
    cancelled: RunState | None,
    before: int = 0,
    why: str = "",
) -> Ending:
    """Return how an attempt ended, and record it if its worker could not.

    Args:
        files: the run's.
        config_hash: of the configuration that the run should have finished.
        exit_code: the worker's; minus the signal if one ended it; None if unknown.
        cancelled: how it was cancelled, if it was: by us, or in the cluster.
        before: the newest attempt that had ended when the worker began (`ended_attempts`): a worker
            that is killed early writes none, and its predecessor's ending is not its own.
        why: the cluster's reason, used if the worker left no message.
    """
    done, attempts = read_done(files.done), read_attempts(files.attempts)
    last = attempts[-1] if attempts and attempts[-1].number > before else None
    if done is not None and done.config_hash == config_hash:
        return Ending(RunState.DONE, took_s=last.duration_s if last else None)
    ending = _recorded(last, cancelled) or _unrecorded(files, exit_code, cancelled, why)
    if last is not None and last.ending != ending.state:
        end_attempt(files.attempts, last.number, ending.state, exit_code=exit_code, message=ending.message)
    return ending


def log_tail(files: RunFiles) -> list[str]:
    """Return the last lines of a run's output, safe to print."""
    lines = readable(partial(last_output, count=TAIL_LINES), files) or []
    return [plain(line.splitlines()[-1]) for line in lines]  # of a progress bar, its last state


def _recorded(attempt: Attempt | None, cancelled: RunState | None) -> Ending | None:
    if attempt is None or attempt.ending not in ENDINGS:
        return None
    state, message = RunState(attempt.ending), plain(attempt.message, LONGEST_MESSAGE)
    if state is RunState.INTERRUPTED and cancelled:  # the worker does not know why it was interrupted
        state = cancelled
    return Ending(state, message, took_s=attempt.duration_s)


def _unrecorded(files: RunFiles, exit_code: int | None, cancelled: RunState | None, why: str) -> Ending:
    if cancelled:
        return Ending(cancelled, why or LIMITS.get(cancelled, ""))
    if exit_code is None:
        return Ending(RunState.INFRASTRUCTURE, why or "the worker vanished without a message")
    if exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}  # not the real-time signals
        name = names.get(-exit_code, f"signal {-exit_code}")
        hint = "; the machine may be out of memory" if exit_code == -signal.SIGKILL else ""
        return Ending(RunState.INFRASTRUCTURE, f"the worker was killed by {name}{hint}")
    output = next(filter(None, reversed(log_tail(files))), "")
    no_message = f"the worker exited with code {exit_code} and no message"
    if exit_code == EXIT_INFRASTRUCTURE:
        no_message += "; is the disk full?"  # else its log would say what was missing
    if exit_code in OWN_CODES:
        message = output or no_message
    else:  # what was printed last need not be why
        message = f"{no_message}; last output: {output}" if output else no_message
    states = {EXIT_INFRASTRUCTURE: RunState.INFRASTRUCTURE, EXIT_INTERRUPTED: RunState.INTERRUPTED}
    return Ending(states.get(exit_code, RunState.FAILED), message)


# of a worker that printed why
OWN_CODES = (EXIT_CONFIG, EXIT_RUN_FAILED, EXIT_RECORDS, EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED)
SCORING = "reward"  # the phase
TAKEN = re.compile(r"(?:^|, )\d+ s$")  # what a worker adds to its progress every second
GRACE_S = 30.0  # to save a checkpoint after a timeout, before the worker is killed
CHECKS = 8  # per stall_timeout: a stall is noticed at most an eighth late
LONGEST_STEPS = 20.0  # stall_timeout = "auto" is so many of the longest step,
LEAST_STALL_S = 1800.0  # and at least this
LAST_ROWS = 8  # read for that: more steps than fit between two looks if one of them is long enough to count
SUSPENDED_S = 5.0  # a look that is later: we were suspended, perhaps with the workers (a paused container)


@dataclass
class Active:
    """A worker that runs, or waits in a cluster's queue, perhaps for days."""

    run: RunPlan
    files: RunFiles
    before: int  # the newest attempt that had ended when this worker began
    patience: Patience | None = None  # once it has begun
    cancelled: RunState | None = None
    kill_at_s: float = math.inf


class Patience:
    """How long a worker may run, and how long without a step."""

    def __init__(
        self,
        campaign: CampaignSection,
        files: RunFiles,
        now_s: float,
        is_api_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin; while `is_api_paused` for some worker, others may wait for its permits: that is no stall."""
        self._files, self._is_any_paused = files, is_api_paused
        self._timeout_at_s = now_s + campaign.run_timeout if campaign.run_timeout else math.inf
        self._adapts = campaign.stall_timeout == "auto"
        self._stall_s = LEAST_STALL_S if campaign.stall_timeout == "auto" else campaign.stall_timeout
        self._said = ""  # by the worker, of how far it is
        self._check_at_s = now_s if self._stall_s else math.inf
        self._moved_at_s = now_s
        self._size = -1

    def ended_by(self, now_s: float) -> RunState | None:
        """Return which timeout has passed, or None."""
        if now_s >= self._timeout_at_s:
            progress = self._progress()  # the time for which the API has not worked does not count
            if now_s >= self._timeout_at_s + (progress.paused_s if progress else 0.0):
                return RunState.TIMEOUT
        if now_s < self._check_at_s:
            return None
        if (late_s := now_s - self._check_at_s) > SUSPENDED_S:
            self._moved_at_s += late_s
        self._check_at_s = now_s + self._stall_s / CHECKS
        size = 0
        for rows in (self._files.metrics, self._files.warmup):
            with suppress(OSError):
                size += rows.stat().st_size
        if size != self._size:
            if self._adapts:  # to rows, and to the time without one, less what a check adds
                ends = readable(partial(read_ends, n=LAST_ROWS), self._files.metrics)
                steps_s = [number_in(row, "step_time_s") or 0.0 for row in ends.last] if ends else []
                longest_s = max([now_s - self._moved_at_s - self._stall_s / CHECKS, *steps_s])
                self._stall_s = max(self._stall_s, LONGEST_STEPS * longest_s)
            self._size, self._moved_at_s = size, now_s
        if (said := self._heard()) != self._said:
            self._said, self._moved_at_s = said, now_s
        if now_s - self._moved_at_s < self._stall_s:
            return None
        if self.is_in(PAUSED) or self._is_any_paused():
            self._moved_at_s = now_s
            return None
        return RunState.STALLED

    def _heard(self) -> str:
        """Return how far the worker says that it is, without the time taken; "" if it says nothing.

        With a timeout in seconds only how many completions are scored: programs may run for long.
        """
        progress = self._progress()
        if progress is None or not (self._adapts or progress.phase == SCORING):
            return ""
        return f"{progress.phase} {progress.step} {TAKEN.sub('', progress.detail)}"

    def is_in(self, phases: tuple[str, ...]) -> bool:
        """Whether the worker's phase begins with one of these."""
        progress = self._progress()
        return progress is not None and progress.phase.startswith(phases)

    def _progress(self) -> Progress | None:
        """Return what the worker said last; None until it has: its predecessor's words remain till then."""
        files = self._files
        progress, attempts = readable(read_progress, files.status), readable(read_attempts, files.attempts)
        alive = holder(files.lock) if readable(is_held, files.lock) else None
        if progress is None or not attempts or alive is None:
            return None
        return progress if (progress.attempt, alive.pid) == (attempts[-1].number, attempts[-1].pid) else None
