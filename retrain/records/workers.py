"""Which processes of this machine are a campaign's workers."""

from __future__ import annotations

from pathlib import Path

from retrain.records.layout import RunFiles
from retrain.records.locks import holder, is_held


def worker_pids(runs: Path) -> set[int]:
    """Give the process ids that the runs' locks name; a worker outlives the orchestrator that started it.

    Args:
        runs: the directory of a campaign's runs; without one there are no workers.
    """
    if not runs.is_dir():
        return set()
    locks = (RunFiles(directory).lock for directory in runs.iterdir())
    found = (holder(lock) for lock in locks if is_held(lock))  # a dead worker's id may be a stranger's now
    return {one.pid for one in found if one is not None and one.is_here}
