"""Checkpoints: written atomically, verified when read; the newest valid one is used.

A checkpoint is written to a temporary directory, synced to disk and renamed into place. `digests.json` lists
the SHA-256 of each file; a checkpoint whose files do not match is skipped.
"""

# ruff: noqa: PTH102, PTH105 (calls on `os`, where the crash tests replace them)

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from retrain.base.errors import RecordsError, is_passing, os_errors, records_error
from retrain.control.rules import StateDict
from retrain.records.files import (
    DIRECTORY_MODE,
    make_directory,
    opened,
    read_json,
    sync_directory,
    write_json,
)
from retrain.records.text import count_of, gib

NAME = re.compile(r"step-(\d{6,})")
DIGESTS = "digests.json"
STATE = "trainer.json"
LATER = "later.json"  # parts of the state that changed since, but for the policy; written by one rename


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: step, directory and the trainer's own state."""

    step: int
    directory: Path
    state: StateDict


def written(root: Path) -> str:
    """Return how much of the checkpoint that is being written is on disk, in words."""
    sizes: list[int] = []
    with suppress(OSError):  # it was moved into place meanwhile
        for path in root.glob(".step-*.partial/**/*"):
            if path.is_file():
                sizes.append(path.stat().st_size)
    return f"{count_of(len(sizes), 'file')}, {gib(sum(sizes))}" if sizes else ""


def save(root: Path, step: int, state: StateDict, save_backend: Callable[[Path], object], keep: int) -> Path:
    """Write the checkpoint of `step`, then delete all but the newest `keep`; a failure leaves them intact."""
    make_directory(root)
    final, temporary = root / f"step-{step:06d}", root / f".step-{step:06d}.partial"
    try:
        _remove(root.glob(".step-*.partial"))  # left by killed workers
        os.mkdir(temporary, DIRECTORY_MODE)
        with os_errors():
            save_backend(temporary)
        write_json(temporary / STATE, state, durable=False)  # synced with the others
        inside = sorted(temporary.rglob("*"))
        files = [path for path in inside if path.is_file()]
        for path in files:
            path.chmod(0o600)
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        write_json(temporary / DIGESTS, {str(path.relative_to(temporary)): _sha256(path) for path in files})
        for folder in (temporary, *(path for path in inside if path.is_dir())):
            sync_directory(folder)
        if final.exists():  # damaged, or this step would not have been repeated
            shutil.rmtree(final)
        os.replace(temporary, final)
        sync_directory(root)
    except BaseException as error:
        _remove([temporary])  # free its space
        if isinstance(error, OSError):
            raise records_error(final, "write the checkpoint", error) from error
        raise
    _remove(_by_step(root, after=step))  # damaged ones
    _remove(_by_step(root)[keep:])
    return final


def amend(root: Path, step: int, parts: StateDict) -> None:
    """Replace parts of the state in a checkpoint; nothing happens if there is none of that step."""
    if (directory := root / f"step-{step:06d}").is_dir():
        write_json(directory / LATER, parts, durable=True)


def newest(root: Path, on_damaged: Callable[[Path], None] = lambda _: None) -> Checkpoint | None:
    """Return the newest valid checkpoint; None if there is none. Newer ones are damaged: see `on_damaged`.

    One that cannot be read for now is not: that is a RecordsError, as the next save would delete it. The
    directory entry is synced: its writer may have been killed after the rename and before the sync.
    """
    try:
        for directory in _by_step(root):
            if _is_whole(directory):
                sync_directory(root)
                return _read(directory)
            on_damaged(directory)
    except OSError as error:
        raise records_error(root, "look for a checkpoint", error) from error
    return None


def of_step(root: Path, step: int) -> Checkpoint | None:
    """Return the checkpoint of a step; None if there is none, or it is damaged."""
    directory = next((path for path in _by_step(root) if _step(path) == step), None)
    return _read(directory) if directory is not None and _is_whole(directory) else None


def steps_of(root: Path) -> list[int]:
    """Return the steps that have a checkpoint, damaged or not, in ascending order."""
    return sorted(map(_step, _by_step(root)))


def _read(directory: Path) -> Checkpoint:
    state = (read_json(directory / STATE) or {}) | (read_json(directory / LATER) or {})
    return Checkpoint(_step(directory), directory, state)


def _is_whole(directory: Path) -> bool:
    """Whether all files of a checkpoint are as written; raise RecordsError if that is unknown for now."""
    try:
        digests = read_json(directory / DIGESTS) or {}
        return STATE in digests and all(_sha256(directory / name) == sha for name, sha in digests.items())
    except (FileNotFoundError, ValueError, TypeError):
        return False
    except RecordsError as error:  # also of a pipe or a directory in a file's place
        if is_passing(error) or isinstance(error.__cause__, PermissionError):
            raise
        return False


def _by_step(root: Path, after: int = -1) -> list[Path]:
    try:
        checkpoints = [path for path in root.iterdir() if _step(path) > after]
    except (FileNotFoundError, NotADirectoryError):  # any other error does not mean that there are none
        return []
    return sorted(checkpoints, key=_step, reverse=True)


def _remove(directories: Iterable[Path]) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _step(directory: Path) -> int:
    match = NAME.fullmatch(directory.name)
    return int(match[1]) if match else -1


def _sha256(path: Path) -> str:
    with opened(path) as fd, os.fdopen(fd, "rb", 0, closefd=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
