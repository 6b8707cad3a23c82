"""Where a policy is published: a directory that is written whole or not at all.

It is made beside its place, under a lock, and moved there at the end. What it replaces is whole until then,
whatever is killed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from retrain.base.errors import ConfigError, RecordsError, os_errors, records_error
from retrain.base.locks import hold, present_holder

FACTS = "retrain.json"  # marks a directory as published
AGAIN = "publish again"


@contextmanager
def made_beside(directory: Path, *, force: bool) -> Iterator[Path]:
    """Make a directory beside its place while entered, then move it there; a failure changes nothing."""
    if directory.name in ("", ".."):  # it would be replaced under the feet of who is in it
        raise ConfigError(f"{directory}: -o needs a directory's name; write it as ../NAME")
    place = Path(os.path.realpath(directory))  # of a link, what it points to
    try:
        with _alone(directory, place):
            yield from _replacing(directory, place, force=force)
    except OSError as error:
        raise records_error(directory, "write it", error, AGAIN) from error


@contextmanager
def _alone(directory: Path, place: Path) -> Iterator[None]:
    """Hold the lock on a place while entered; its file is there only meanwhile."""
    path = place.with_name(f".{place.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            lock = hold(path)
        except RecordsError as error:  # of a file that no user knows
            raise error.__cause__ if isinstance(error.__cause__, OSError) else error from error
        if lock is None:
            who = present_holder(path) or "another process"
            raise ConfigError(f"{directory}: {who} is publishing there; wait for it, or name another with -o")
        if lock.is_in_place:
            break
        lock.release()  # of one who has just removed the file
    with lock:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _replacing(directory: Path, place: Path, *, force: bool) -> Iterator[Path]:
    aside = place.with_name(f".{place.name}.replaced")
    _restore(place, aside)  # if one was killed
    if directory.exists() or directory.is_symlink():
        if not (directory / FACTS).is_file():
            raise ConfigError(f"{directory}: exists, and is not from `retrain publish`; -o names another")
        if not force:
            raise ConfigError(f"{directory}: exists; --force replaces it, -o names another")
    partial = place.with_name(f".{place.name}.partial")
    try:
        for left in (aside, partial):  # by one that was killed
            _discard(left)
        partial.mkdir()
        with os_errors():
            yield partial
        try:  # what was there is whole, there or aside, until the new one is there
            if place.exists():
                place.rename(aside)
            partial.rename(place)
        except BaseException:
            _restore(place, aside)
            raise
        _discard(aside)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _restore(place: Path, aside: Path) -> None:
    """Move what was put aside back to its place if nothing is there."""
    if not place.exists() and (aside / FACTS).is_file():
        aside.rename(place)


def _discard(aside: Path) -> None:
    """Remove what was put aside; from its first file on it is never restored."""
    with suppress(OSError):
        (aside / FACTS).unlink(missing_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
