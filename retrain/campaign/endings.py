"""How a worker's end is interpreted: its run's files first, its exit code second."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from retrain.errors import EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED, RecordsError, RetrainError, may_pass
from retrain.records.attempts import Attempt, end_attempt, read_attempts
from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.run_row import last_output
from retrain.records.run_state import RunState, read_done
from retrain.records.text import plain

TAIL_LINES = 12
ENDINGS = frozenset(state.value for state in RunState)
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
        cancelled: why we cancelled it, if we did.
        before: the newest attempt that had ended when the worker began (`ended_attempts`): a worker
            that is killed early writes none, and its predecessor's ending is not its own.
        why: the engine's reason, used if the worker left no message.

    Raises:
        RecordsError: a file cannot be read or written.
    """
    done = read_done(files.done)
    last = next((a for a in reversed(read_attempts(files.attempts)) if a.number > before), None)
    if done is not None and done.config_hash == config_hash:
        return Ending(RunState.DONE, took_s=last.duration_s if last else None)
    recorded = _recorded_by_worker(last)
    if recorded is None:
        ending = Ending(cancelled) if cancelled else _from_exit_code(files, exit_code, why)
    elif (
        recorded.state is RunState.INTERRUPTED and cancelled
    ):  # the worker does not know why it was interrupted
        ending = Ending(cancelled, recorded.message, took_s=recorded.took_s)
    else:
        ending = recorded
    if last is not None and ending != recorded:
        end_attempt(files.attempts, last.number, ending.state, exit_code=exit_code, message=ending.message)
    return ending


def traceless(states: Mapping[str, RunState], endings: Mapping[str, Ending]) -> dict[str, RunState]:
    """Return the states of runs whose workers ended before they wrote a record."""
    return {run_id: e.state for run_id, e in endings.items() if states[run_id] is RunState.PENDING}


def log_tail(files: RunFiles) -> list[str]:
    """Return the last lines of a run's output, safe to print."""
    lines = readable(partial(last_output, count=TAIL_LINES), files) or []
    return [plain(line.splitlines()[-1]) for line in lines]  # of a progress bar, its last state


def _recorded_by_worker(attempt: Attempt | None) -> Ending | None:
    if attempt is None or attempt.ending not in ENDINGS:
        return None
    message = plain(attempt.message, LONGEST_MESSAGE)
    return Ending(RunState(attempt.ending), message, took_s=attempt.duration_s)


def _from_exit_code(files: RunFiles, exit_code: int | None, why: str) -> Ending:
    if exit_code is None:
        return Ending(RunState.INFRASTRUCTURE, why or "the worker vanished without a message")
    if exit_code < 0:
        name = _signal_name(-exit_code)
        hint = "; the machine may be out of memory" if exit_code == -signal.SIGKILL else ""
        return Ending(RunState.INFRASTRUCTURE, f"the worker was killed by {name}{hint}")
    said = next(filter(None, reversed(log_tail(files))), "")
    no_message = f"the worker exited with code {exit_code} and no message"
    if exit_code == EXIT_INFRASTRUCTURE:
        no_message += "; is the disk full?"  # else its log would say what was missing
    message = said or no_message
    known = {EXIT_INFRASTRUCTURE: RunState.INFRASTRUCTURE, EXIT_INTERRUPTED: RunState.INTERRUPTED}
    return Ending(known.get(exit_code, RunState.FAILED), message)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # Python names only the first and the last of the real-time signals
        return f"signal {number}"
