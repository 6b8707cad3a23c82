"""One tree of errors; each branch has the exit code of the command line.

Raise the most specific class, with a message that says where, what and how to fix it.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_CONFIG = 2
EXIT_LAUNCH = 3
EXIT_RUN_FAILED = 4
EXIT_RECORDS = 5
EXIT_ATTENTION = 6  # of `retrain wait`
EXIT_INFRASTRUCTURE = 75  # EX_TEMPFAIL in sysexits.h: a retry may help
EXIT_INTERRUPTED = 130


Location: TypeAlias = tuple[str | int, ...]  # keys and positions in lists, such as ("training", "lr")
BARE = re.compile(r"[A-Za-z0-9_-]+")  # keys that TOML reads without quotes
LISTS: dict[Location, str] = {
    ("campaign", "conditions"): "[[campaign.conditions]]",
    ("eval", "tables"): "[[eval]]",
    ("data", "source"): "[[data.source]]",
}


def as_key(name: str) -> str:
    """Return a key as TOML writes it, in quotes if it needs them."""
    return name if BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def place(location: Location) -> str:
    """Write a location as TOML shows it: `[training].lr`, `[algorithm.loss_params].clip_low`."""
    listed = LISTS.get(location[:2], "")
    if listed and location[:3] != ("campaign", "conditions"):
        shown = (f"#{one + 1}" if isinstance(one, int) else f'"{one}"' for one in location[2:3])
        table_name, inside = " ".join([listed, *shown]), location[3:]
        return table_name + (f" {place(inside)}" if len(inside) > 1 else "".join(f".{key}" for key in inside))
    if isinstance(location[-1], int):
        return f"{place(location[:-1])} #{location[-1] + 1}"
    *tables, key = [as_key(str(part)) for part in location]
    return f"[{'.'.join(tables)}].{key}" if tables else f"[{key}]"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong in a file, and where: its text is `[table].key: what`."""

    where: Location  # in the file, or in a plugin's own table; empty if not known
    what: str  # the value, and how to fix it

    def __str__(self) -> str:
        return f"{place(self.where)}: {self.what}" if self.where else self.what

    @property
    def in_table(self) -> str:
        """Its text if it is a problem of a plugin's own table: `key: what`."""
        return f"{'.'.join(map(str, self.where))}: {self.what}" if self.where else self.what

    def below(self, *tables: str | int) -> Problem:
        """Return a problem of a table with the place of that table."""
        return Problem((*tables, *self.where), self.what)


class RetrainError(Exception):
    """Anything that retrain reports without a traceback."""

    exit_code = EXIT_BUG


class ConfigError(RetrainError):
    """Bad usage or configuration; holds every problem found, one line each."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class PromptError(ConfigError):
    """A prompt, or messages of an environment, cannot be given to the model."""


class FullContextError(PromptError):
    """A prompt leaves no room for a completion in the model's context."""


class LaunchError(RetrainError):
    """A run or campaign could not be started."""

    exit_code = EXIT_LAUNCH


class ClusterDownError(LaunchError):
    """The cluster that runs workers does not answer at present; retrying later may help."""


class RunFailedError(RetrainError):
    """A run started and failed: an unchanged retry would fail again."""

    exit_code = EXIT_RUN_FAILED


class NonFiniteError(RunFailedError):
    """A loss, gradient or metric was NaN or infinite; nothing was updated."""


class RecordsError(RetrainError):
    """Files of a run or campaign cannot be read or written."""

    exit_code = EXIT_RECORDS


class DamagedRecordError(RecordsError):
    """A file can be read, but differs from what was written."""


class InfrastructureError(RetrainError):
    """The infrastructure failed (connection, machine, memory): a retry may help."""

    exit_code = EXIT_INFRASTRUCTURE


class UnscoredStepError(InfrastructureError):
    """No completion of a step has a score, since the scorer is away; the policy is unchanged."""


class InterruptedRunError(RetrainError):
    """A stop was requested; progress is saved."""

    exit_code = EXIT_INTERRUPTED


class BackendMemoryError(InfrastructureError):
    """A step did not fit in memory; weights are unchanged and a smaller step may fit."""


_FIXES = {
    errno.ENOSPC: "free some disk space, then {then}",
    errno.EDQUOT: "free some of your disk quota, then {then}",
    errno.EFBIG: "raise the file size limit (ulimit -f), then {then}",
    errno.EACCES: "make it readable and writable for this user",
    errno.EPERM: "make it readable and writable for this user",
    errno.EROFS: "the file system is read-only: remount it or use another",
    errno.ELOOP: "it is a symbolic link, which records never follow: remove the link",
    errno.EISDIR: "something else is in its place: move it away",
    errno.ENOTDIR: "something else is on its way: move it away",
    errno.EMFILE: "raise the limit of open files (ulimit -n), then {then}",
    errno.ENFILE: "this machine has too many open files: end what holds them, then {then}",
    errno.EIO: "the disk reports an error: check it, or use another",
}
_LASTING = frozenset(
    {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR}
)


def may_pass(error: RecordsError) -> bool:
    """Whether a retry may help: a full disk may be freed, but permissions do not change by themselves."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in _LASTING


_SURROUNDINGS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN),
        *(errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE),  # out of memory, processes or open files
    }
)


_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def os_errors() -> Iterator[None]:
    """Raise the OSError that an error of a library in Rust, such as safetensors, only names in its text."""
    try:
        yield
    except Exception as error:
        match = None if isinstance(error, OSError | RetrainError) else _OS_ERROR.search(str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1]))) from error


def exit_code_of(error: Exception) -> int:
    """Return the exit code of a worker ended by this error; 75 if another attempt may succeed.

    Either the run failed, or the machine or network around it.
    """
    if isinstance(error, RecordsError) and may_pass(error):
        return EXIT_INFRASTRUCTURE
    if isinstance(error, RetrainError):
        return EXIT_RUN_FAILED if error.exit_code == EXIT_BUG else error.exit_code
    return EXIT_INFRASTRUCTURE if is_passing(error) else EXIT_RUN_FAILED


def is_passing(error: Exception) -> bool:
    """Whether the machine or network around a run is the cause of an error, so that a retry may help."""
    import socket  # imported late: few runs fail

    cause: BaseException | None = error
    while cause is not None:  # libraries wrap a lost connection in errors of their own
        if isinstance(cause, (ConnectionError, MemoryError, TimeoutError)):
            return True
        if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_AGAIN:
            return True
        if isinstance(cause, OSError) and cause.errno in _SURROUNDINGS:
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def records_error(path: Path, doing: str, error: Exception, then: str = "resume") -> RecordsError:
    """Return an error that names the file, the problem, the fix, and what to do then."""
    number, words = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
    fix = _FIXES.get(number or 0, "check the path and the disk").format(then=then)
    return RecordsError(f"{path}: cannot {doing} ({words or error}); {fix}")
