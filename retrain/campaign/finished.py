"""Finished runs that still need something: rows that their loggers lack, or a new start because rows changed.

Loggers lack rows because a tool was away or too slow when the run ended. Of a run whose metrics.jsonl changed
afterwards nothing is deleted: its files are kept as `metrics.jsonl.damaged` and `checkpoints.damaged`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from retrain.campaign.rollup import RollUp
from retrain.errors import DamagedRecordError, RecordsError
from retrain.locks.held import hold
from retrain.plan.matrix import RunPlan
from retrain.records.attempts import end_attempt, read_attempts
from retrain.records.files import remove_file, set_aside
from retrain.records.layout import RunFiles
from retrain.records.metrics import require_sealed
from retrain.records.run_state import RunState, read_done
from retrain.records.text import count_of


def deliver_missing(
    finished: Sequence[RunPlan],
    files_of: Callable[[str], RunFiles],
    roll_up: RollUp,
    say: Callable[[str], None],
    is_stopped: Callable[[], bool],
) -> None:
    """Log the rows that loggers lack of finished runs, run by run; for the holder of the campaign's lock."""
    behind = [run for run in finished if run.config.logging.loggers and _is_behind(run, files_of(run.run_id))]
    if behind:
        say(f"logging the missing rows of {count_of(len(behind), 'finished run')}")
    for run in behind:
        if is_stopped():
            return
        _deliver(run, files_of(run.run_id), is_stopped)
        roll_up.changed(run.run_id)


def _is_behind(run: RunPlan, files: RunFiles) -> bool:
    from retrain.trainer.logger_threads import is_behind

    done = read_done(files.done)
    return done is not None and is_behind(run.config, files, done.result)


def _deliver(run: RunPlan, files: RunFiles, is_stopped: Callable[[], bool]) -> None:
    from retrain.trainer.logger_threads import deliver

    lock, done, attempts = hold(files.lock), read_done(files.done), read_attempts(files.attempts)
    if lock is None or done is None or not attempts:
        return  # its worker still runs
    with lock:
        last = attempts[-1]
        lacking = deliver(run.config, files, last.number, done.result, is_stopped)
        end_attempt(
            files.attempts,
            last.number,
            RunState.DONE,
            exit_code=last.exit_code,
            message=lacking,
            duration_s=last.duration_s,
            ended_at=last.ended_at,
        )


def set_aside_changed(files: RunFiles) -> bool:
    """Prepare a run with changed rows to run again; for the holder of the campaign's lock.

    Returns:
        Whether its rows had changed; if not, or if that is unknown, it is left as it is.
    """
    if not _has_changed(files):
        return False
    for path in (files.checkpoints, files.metrics):
        set_aside(path)
    remove_file(files.done)  # last: a kill before this repeats all of it
    return True


def _has_changed(files: RunFiles) -> bool:
    try:
        done = read_done(files.done)
        seal = done.seal if done is not None else None
    except RecordsError:
        return False
    try:
        if seal is not None:
            require_sealed(files.metrics, seal)
    except DamagedRecordError:
        return True
    except RecordsError:
        return False
    return False
