"""Which runs a campaign's jobs have taken on: a small file per run and number, in `ray/taken/`.

Made by whoever takes the run, before anything is done about it; of two that try, one can. Its first line
names the job that works on the run: the run's own, or one that was done with a run of its own. A line for
each worker of that number that has left is its exit code: one, unless the engine started the job twice.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from retrain.errors import EXIT_DONE, EXIT_RUN_FAILED, records_error
from retrain.records.files import FILE_MODE, make_directory, remove_file, write_all

SETTLED = frozenset({EXIT_DONE, EXIT_RUN_FAILED})  # exit codes that say nothing bad of the machine


@dataclass(frozen=True, slots=True)
class Taken:
    """Who has taken a run on."""

    number: int
    job: str  # "" for a moment, until it is written
    exit_code: int | None = None  # of its worker; None while that has not left, as far as is known

    @property
    def is_settled(self) -> bool:
        """Whether the run is over, though its job may go on with another one."""
        return self.exit_code in SETTLED


class Marks:
    """The files of one campaign."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def prepare(self) -> None:
        """Make the directory."""
        make_directory(self._directory)

    def newest(self) -> dict[str, int]:
        """Return the newest number under which each run was taken on."""
        newest: dict[str, int] = {}
        names = os.listdir(self._directory) if self._directory.is_dir() else ()  # noqa: PTH208
        for name in names:
            run_id, _, number = name.rpartition(".")
            if number.isdigit():
                newest[run_id] = max(newest.get(run_id, 0), int(number))
        return newest

    def take(self, run_id: str, number: int, job: str) -> bool:
        """Take a run on for a job; False if somebody did so before.

        Raises:
            RecordsError: the disk refuses.
        """
        path = self._path(run_id, number)
        try:
            self._write(path, os.O_CREAT | os.O_EXCL, f"{job}\n")
        except FileExistsError:
            return False
        except OSError as error:
            raise records_error(path, "write", error) from error
        return True

    def give_back(self, run_id: str, number: int) -> None:
        """Let others take a run on again. Raises as `take` does."""
        remove_file(self._path(run_id, number))

    def note_exit(self, run_id: str, number: int, code: int) -> None:
        """Say that the worker has left. Raises as `take` does."""
        path = self._path(run_id, number)
        try:
            self._write(path, os.O_APPEND, f"{code}\n")
        except OSError as error:
            raise records_error(path, "write", error) from error

    def read(self, run_id: str, number: int) -> Taken | None:
        """Return who has taken a run on under a number; None if nobody has, or that cannot be read."""
        if not number:
            return None
        try:
            lines = self._path(run_id, number).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            return None
        codes = [int(line) for line in lines[1:] if line.lstrip("-").isdigit()]
        settled = [code for code in codes if code in SETTLED]  # a second job of the run may have left before
        return Taken(number, lines[0] if lines else "", [None, *codes, *settled][-1])

    def _path(self, run_id: str, number: int) -> Path:
        return self._directory / f"{run_id}.{number}"

    @staticmethod
    def _write(path: Path, how: int, text: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | how, FILE_MODE)
        try:
            write_all(fd, text.encode())
        finally:
            os.close(fd)
