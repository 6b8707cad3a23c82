"""One tree of errors; each branch carries the exit code that the command line ends with.

Raise the narrowest branch, with a message that says where, what and how to fix.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_CONFIG = 2
EXIT_LAUNCH = 3
EXIT_RUN_FAILED = 4
EXIT_RECORDS = 5
EXIT_INFRASTRUCTURE = 75  # sysexits' EX_TEMPFAIL: trying again may help
EXIT_INTERRUPTED = 130


class RetrainError(Exception):
    """Anything that retrain reports without a traceback."""

    exit_code = EXIT_BUG


class ConfigError(RetrainError):
    """Bad usage or configuration; holds every problem found, one line each."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class LaunchError(RetrainError):
    """A run or campaign could not be started."""

    exit_code = EXIT_LAUNCH


class EngineDownError(LaunchError):
    """The engine that runs workers does not answer at present; later it may."""


class RunFailedError(RetrainError):
    """A run started and failed: trying again unchanged would fail again."""

    exit_code = EXIT_RUN_FAILED


class NonFiniteError(RunFailedError):
    """A loss, gradient or metric was NaN or infinite; nothing was updated."""


class RecordsError(RetrainError):
    """Files of a run or campaign cannot be read or written."""

    exit_code = EXIT_RECORDS


class DamagedRecordError(RecordsError):
    """A file can be read, and is not what was written there."""


class InfrastructureError(RetrainError):
    """The surroundings failed (connection, machine, memory): trying again may help."""

    exit_code = EXIT_INFRASTRUCTURE


class InterruptedRunError(RetrainError):
    """Somebody asked to stop; what was done is saved."""

    exit_code = EXIT_INTERRUPTED


class BackendMemoryError(InfrastructureError):
    """A step did not fit in memory; weights are unchanged and a smaller step may fit."""


_FIXES = {
    errno.ENOSPC: "free some disk space, then resume",
    errno.EDQUOT: "free some of your disk quota, then resume",
    errno.EFBIG: "raise the file size limit (ulimit -f), then resume",
    errno.EACCES: "make it readable and writable for this user",
    errno.EPERM: "make it readable and writable for this user",
    errno.EROFS: "the file system is read-only: remount it or choose another log_dir",
    errno.ELOOP: "it is a symbolic link, which records never follow: remove the link",
    errno.EISDIR: "something else is in its place: move it away",
    errno.ENOTDIR: "something else is on its way: move it away",
    errno.EMFILE: "raise the limit of open files (ulimit -n), then resume",
    errno.ENFILE: "this machine has too many open files: end what holds them, then resume",
    errno.EIO: "the disk reports an error: check it, or choose another log_dir",
}
_LASTING = frozenset(
    {errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR}
)


def may_pass(error: RecordsError) -> bool:
    """Whether trying again may help: a disk may have space again, a forbidden file stays forbidden."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in _LASTING


def records_error(path: Path, doing: str, error: OSError) -> RecordsError:
    """Return which file, what went wrong and how to fix it."""
    fix = _FIXES.get(error.errno or 0, "check the path and the disk")
    return RecordsError(f"{path}: cannot {doing} ({error.strerror or error}); {fix}")
