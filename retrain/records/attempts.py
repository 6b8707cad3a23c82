"""attempts.jsonl: the attempts of a run, each with its start and its end.

There are two kinds of lines, both append-only: the start of an attempt and its end. An attempt without
an end line whose run.lock is free belongs to a process that died without recording why.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from retrain.clock import utc_now
from retrain.records.files import read_small, record_of
from retrain.records.lines import LineAppender, append_line, dump_line, parse_line

PACKAGES = ("numpy", "torch", "transformers", "peft", "tinker")  # results may depend on their versions
_UNKNOWN = {"pid": 0, "host": "", "started_at": "", "resumed_from_step": 0}


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
    job: str = ""  # the engine's job: `slurm 123_4`
    software: str = ""  # installed on its host: `Python 3.12.1, numpy 2.3.0`


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
    ended_at: str | None = None,
) -> None:
    """Record how an attempt ended (now, unless `ended_at` is given); the last recorded end counts."""
    end = {
        "event": "end",
        "attempt": number,
        "ended_at": ended_at or utc_now(),
        "ending": ending,
        "exit_code": exit_code,
        "message": message,
        "duration_s": duration_s,
    }
    append_line(path, end)


def read_attempts(path: Path) -> tuple[Attempt, ...]:
    """Read a run's attempts in the order of their numbers; lines that are not attempts are skipped."""
    attempts: dict[int, Attempt] = {}
    for line in (read_small(path) or b"").splitlines():  # for every run, so in as few calls as possible
        row = parse_line(line) or {}
        number = row.get("attempt")
        if not isinstance(number, int):
            continue
        with suppress(LookupError, TypeError, ValueError, OverflowError):
            if row.get("event") == "begin" and number not in attempts:
                attempts[number] = record_of(Attempt, _UNKNOWN | row | {"number": number})
            elif row.get("event") == "end" and number in attempts:
                attempts[number] = record_of(Attempt, vars(attempts[number]) | row)
    return tuple(attempts[number] for number in sorted(attempts))


@cache  # does not change during a process's life
def installed() -> str:
    """Return the versions of Python and the packages in `PACKAGES`, without importing them."""
    from importlib import metadata  # not at the top: costs 15 ms, and readers never need it

    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
