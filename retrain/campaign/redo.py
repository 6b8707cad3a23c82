"""Finished runs whose rows changed afterwards: moved out of the way, so that they run again from their start.

Nothing is deleted: what was found is kept beside as `metrics.jsonl.damaged` and `checkpoints.damaged`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from retrain.errors import DamagedRecordError, RecordsError
from retrain.records.files import records_error, remove_file
from retrain.records.layout import RunFiles
from retrain.records.run_state import read_done
from retrain.records.seal import require_sealed


def set_aside_changed(files: RunFiles) -> bool:
    """Make a run with changed rows ready to run again; for the holder of the campaign's lock.

    Returns:
        Whether its rows had changed; if not, or if that cannot be told, it is left as it is.

    Raises:
        RecordsError: its files cannot be moved.
    """
    if not _has_changed(files):
        return False
    for path in (files.checkpoints, files.metrics):
        _move_aside(path)
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


def _move_aside(path: Path) -> None:
    aside = path.with_name(f"{path.name}.damaged")
    try:
        if path.is_dir():
            shutil.rmtree(aside, ignore_errors=True)  # a directory replaces only an empty one
        path.replace(aside)
    except FileNotFoundError:
        return
    except OSError as error:
        raise records_error(path, "move away", error) from error
