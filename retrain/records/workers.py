"""Which processes of this machine are a campaign's workers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from retrain.errors import RecordsError
from retrain.locks.held import Holder, holder, is_held
from retrain.records.layout import RunFiles


def worker_pids(runs: Path) -> set[int]:
    """Return the process ids that the runs' locks name; a worker outlives the orchestrator that started it.

    Args:
        runs: the directory of a campaign's runs; without one there are no workers. A lock that cannot be
            read names nobody.
    """
    try:
        directories = list(runs.iterdir())
    except OSError:
        return set()
    found = (_holder(RunFiles(directory)) for directory in directories)
    return {one.pid for one in found if one is not None and one.is_here}


def _holder(run: RunFiles) -> Holder | None:
    with suppress(RecordsError):
        return holder(run.lock) if is_held(run.lock) else None  # a dead worker's id may be a stranger's now
    return None
