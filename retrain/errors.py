"""One tree of errors; each branch carries the exit code that the command line ends with.

Raise the narrowest branch, with a message that says where, what and how to fix.
"""

from __future__ import annotations

from collections.abc import Sequence

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
