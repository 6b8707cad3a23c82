"""The state of a run, from its files: attempts.jsonl, start.json, status.json and done.json.

In order of precedence: a done.json for this config, then whether run.lock is held, then the last
attempt's ending. status.json adds the step, and never decides whether a run is alive; start.json has what
evaluations found before the first step, which has no row.

attempts.jsonl has two kinds of lines, both append-only: the start of an attempt and its end. An attempt
without an end line whose run.lock is free belongs to a process that died without recording why.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path

from retrain.base.clock import utc_now
from retrain.base.errors import DamagedRecordError, RecordsError
from retrain.base.locks import holder, is_held
from retrain.base.redaction import recorded_error
from retrain.records.files import read_json, read_small, record_of, write_json
from retrain.records.layout import RunFiles
from retrain.records.lines import LineAppender, append_line, dump_line, number_in, parse_line
from retrain.records.metrics import Seal, require_sealed
from retrain.records.row_parts import Columns
from retrain.records.text import first_of

PACKAGES = ("numpy", "torch", "transformers", "peft", "tinker")  # results may depend on their versions
MOST_NAMED = 5  # conditions in one sentence
_UNKNOWN = {"pid": 0, "host": "", "started_at": "", "resumed_from_step": 0}  # of a line that lacks it


class RunState(StrEnum):
    """State of a run; all but the first two are also endings of an attempt."""

    PENDING = "pending"  # not started, or only with another config
    RUNNING = "running"  # run.lock is held
    DIED = "died"  # an attempt started, the lock is free, and no ending was recorded
    DONE = "done"
    FAILED = "failed"  # code or config: an unchanged retry would fail again
    INFRASTRUCTURE = "infrastructure"  # connection, memory, machine: a retry may help
    TIMEOUT = "timeout"
    STALLED = "stalled"
    INTERRUPTED = "interrupted"  # by a user or the system


# beginnings of phases: a worker waits, and all is well; the API that it calls works on none of its calls
API_PAUSED = "API paused"
WAITS_FOR_RUN = "wait for"  # what another run makes for both
PAUSED, API_OUT = ("paused", API_PAUSED, WAITS_FOR_RUN), (API_PAUSED, "API down")
WAITING = "waiting"  # instead of interrupted: at a rung of a search, which goes on with it or drops it
WAITS = "it waits at rung "  # in the message of its attempt
UNREADABLE = "unreadable"  # instead of a run's state: its files exist and cannot be read
ENDINGS = frozenset(RunState) - {RunState.PENDING, RunState.RUNNING}


@dataclass(frozen=True)
class Progress:
    """status.json: where a run is, rewritten by its worker as it goes."""

    state: str
    phase: str  # what the step is doing: sample, reward, train, checkpoint, evaluate, ...
    step: int  # complete steps
    max_steps: int
    attempt: int
    updated_at: str = ""  # filled in by `write_progress`
    message: str = ""
    detail: str = ""  # how far a long phase is
    engine: str = ""  # what the server that samples said last
    engine_server: str = ""  # its log, or its address
    paused_s: float = 0.0  # how long the API had paused all calls, or was down, in this attempt


@dataclass(frozen=True)
class Done:
    """done.json: a finished run, its config and its result."""

    config_hash: str
    finished_at: str
    result: Columns
    metrics: Seal | None = None  # None: the rows are not checked


@dataclass(frozen=True)
class Inspection:
    """A run's state and the records that it follows from."""

    state: RunState
    attempts: tuple[Attempt, ...]
    done: Done | None  # None unless the state is DONE


def write_progress(path: Path, progress: Progress) -> None:
    """Rewrite status.json with the current time."""
    texts = {"message": recorded_error(progress.message), "detail": recorded_error(progress.detail)}
    write_json(path, asdict(progress) | texts | {"updated_at": utc_now()}, durable=False)


def read_progress(path: Path) -> Progress | None:
    """Read status.json; return None if it does not exist."""
    record = read_json(path)
    if record is None:
        return None
    try:
        return record_of(Progress, record)
    except ValueError as error:
        raise RecordsError(f"{path}: is not a run's status ({error!r}); remove it") from error


def write_done(path: Path, config_hash: str, result: Columns, seal: Seal | None = None) -> None:
    """Write done.json, the last file that a worker writes, after its metrics are synced."""
    write_json(path, asdict(Done(config_hash, utc_now(), dict(result), seal)))


def rename_done(path: Path, before: str, now: str) -> None:
    """Replace the config hash `before` in done.json with `now`, if that is the hash it holds."""
    record = read_json(path)
    if record is not None and record.get("config_hash") == before:
        write_json(path, record | {"config_hash": now})


def read_done(path: Path) -> Done | None:
    """Read done.json; None if it does not exist."""
    try:
        record = read_json(path)
        return None if record is None else record_of(Done, record)
    except (DamagedRecordError, ValueError) as error:
        raise DamagedRecordError(
            f"{path}: is damaged; remove it, and `retrain resume` finishes the run from its newest checkpoint"
        ) from error


def inspect_run(files: RunFiles, config_hash: str = "") -> Inspection:
    """Return a run's state, and the records that it follows from; its directory may be missing.

    `config_hash` is that of the config that the run should have, "" accepts any. Raises DamagedRecordError if
    metrics.jsonl changed after the run finished.
    """
    done = sealed_done(files, config_hash)
    if done is None:
        if is_held(files.lock):
            return Inspection(RunState.RUNNING, read_attempts(files.attempts), None)
        done = sealed_done(files, config_hash)  # it may have finished between the two checks
    attempts = read_attempts(files.attempts)
    if done is not None:
        return Inspection(RunState.DONE, attempts, done)
    ending = attempts[-1].ending if attempts else RunState.DONE
    if ending == RunState.DONE:  # not begun, or done with another config
        return Inspection(RunState.PENDING, attempts, None)
    state = RunState(ending) if ending in ENDINGS else RunState.DIED
    if state == RunState.DIED and is_held(files.lock):  # it may have started meanwhile
        state = RunState.RUNNING
    return Inspection(state, attempts, None)


def sealed_done(files: RunFiles, config_hash: str) -> Done | None:
    """Return the done.json of a run that is done with this config, "" for any, once its rows are checked."""
    done = read_done(files.done)
    if done is None or config_hash not in ("", done.config_hash):
        return None
    if done.metrics is not None:
        require_sealed(files.metrics, done.metrics)
    return done


def rung_of(message: str) -> str:
    """Return where a run waits, by the message of its last attempt; "" if it ended for another reason."""
    _, found, rest = message.partition(WAITS)
    return rest.partition(" ")[0] if found else ""


def worker_pids(runs: Path) -> set[int]:
    """Return the process ids of live workers, from the locks of runs in a directory, which may be missing.

    A worker can outlive its orchestrator. A lock that cannot be read is skipped.
    """
    try:
        locks = [RunFiles(directory).lock for directory in runs.iterdir()]
    except OSError:
        return set()
    pids: set[int] = set()
    for lock in locks:
        with suppress(RecordsError):
            one = holder(lock) if is_held(lock) else None  # a dead worker's id may have been reused
            pids |= {one.pid} if one is not None and one.is_here else set()
    return pids


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run (one process); fields that default to None are set when the end is recorded."""

    number: int  # from 1
    pid: int
    host: str
    started_at: str
    resumed_from_step: int  # complete steps in the checkpoint that it resumed from; 0 without one
    ended_at: str | None = None
    ending: str | None = None  # a RunState: done, failed, infrastructure, timeout, stalled, interrupted
    exit_code: int | None = None  # -9 for a process killed by signal 9
    message: str = ""
    duration_s: float | None = None  # monotonic
    job: str = ""  # the cluster's job: `slurm 123_4`
    software: str = ""  # installed on its host: `Python 3.12.1, numpy 2.3.0`
    is_unscored: bool = False  # whether it ended in a step without a row, since no completion had a score


def begin_attempt(path: Path, *, resumed_from_step: int = 0) -> int:
    """Record that this process, which holds the run's lock, starts an attempt; return its number."""
    with LineAppender(path) as lines:  # opening repairs the file, so the lines read below are whole
        number = max((a.number for a in read_attempts(path)), default=0) + 1
        begin = {
            "event": "begin",
            "attempt": number,
            "pid": os.getpid(),
            "host": os.uname().nodename,
            "started_at": utc_now(),
            "resumed_from_step": resumed_from_step,
            "job": os.environ.get("RETRAIN_JOB", ""),
            "software": installed(),
        }
        lines.write(dump_line(begin))
        lines.sync()
    return number


def end_attempt(
    path: Path,
    number: int,
    ending: str,
    *,
    exit_code: int | None = None,
    message: str = "",
    duration_s: float | None = None,
    is_unscored: bool = False,
) -> None:
    """Record how an attempt ended, now; the last recorded end counts."""
    end = {
        "event": "end",
        "attempt": number,
        "ended_at": utc_now(),
        "ending": ending,
        "exit_code": exit_code,
        "message": recorded_error(message),
        "duration_s": duration_s,
        "is_unscored": is_unscored,
    }
    append_line(path, end)


def end_as_done(path: Path, attempt: Attempt, message: str) -> None:
    """Record that an attempt that had ended leaves its run done; what else was recorded of its end stays."""
    end = {"event": "end", "attempt": attempt.number, "ending": RunState.DONE}
    append_line(path, end | {"message": recorded_error(message)})


def read_attempts(path: Path) -> tuple[Attempt, ...]:
    """Read a run's attempts in the order of their numbers; lines that are not attempts are skipped."""
    attempts: dict[int, Attempt] = {}
    for line in (read_small(path) or b"").splitlines():  # for every run, so in as few calls as possible
        row = parse_line(line) or {}
        number = row.get("attempt")
        if not isinstance(number, int):
            continue
        with suppress(ValueError):
            if row.get("event") == "begin" and number not in attempts:
                attempts[number] = record_of(Attempt, _UNKNOWN | row | {"number": number})
            elif row.get("event") == "end" and number in attempts:
                attempts[number] = record_of(Attempt, vars(attempts[number]) | row)
    return tuple(attempts[number] for number in sorted(attempts))


@cache  # does not change during a process's life
def installed() -> str:
    """Return the versions of Python and the packages in `PACKAGES`, without importing them."""
    from importlib import metadata  # not at the top: costs 15 ms, and readers never need it

    versions = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)


@dataclass(frozen=True)
class Start:
    """Evaluations before the first step."""

    metrics: Mapping[str, str | float | None] = field(default_factory=dict)  # as rows have them
    made_by: Mapping[str, str] = field(default_factory=dict)  # run by evaluation, "" for the run's own

    def value(self, metric: str) -> float | None:
        """Return a metric before the first step; None if it is not known."""
        return number_in(dict(self.metrics), metric)


def read_start(files: RunFiles) -> Start:
    """Read a run's evaluations before its first step; none if it has none, or they cannot be read."""
    with suppress(RecordsError, ValueError):
        return record_of(Start, read_json(files.start) or {})
    return Start()


def before_training(
    values: Mapping[str, float | None], gains: Mapping[str, float | None] | None = None
) -> str:
    """Return what conditions began with and gained, as a sentence; "" if that is not known of any."""

    def listed(numbers: Mapping[str, float | None], form: str) -> list[str]:
        return [f"{name} {value:{form}}" for name, value in numbers.items() if value is not None]

    if not (begun := listed(values, ".3g")):
        return ""
    shown = {f"{value:.3g}" for value in values.values() if value is not None}
    start = shown.pop() if len(shown) == 1 else first_of(begun, MOST_NAMED)
    gained = listed(gains or {}, "+.3g")
    return f"before training {start}" + (f"; since then {first_of(gained, MOST_NAMED)}" if gained else "")
