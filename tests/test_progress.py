"""status.json shows what a run is doing, also if it began a moment after something else."""

import threading
from pathlib import Path

from retrain.records.layout import RunFiles
from retrain.records.run_state import RunState, read_progress
from retrain.trainer.journal import Journal
from tests.semaphore_processes import wait_until


def phase_in(files: RunFiles) -> str:
    found = read_progress(files.status)
    return found.phase if found else ""


def test_the_last_of_several_quick_phases_is_shown(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    journal = Journal(files, attempt=1, max_steps=3)
    for phase in ("reward", "train", "sample"):
        journal.phase(phase, 1)
    wait_until(lambda: phase_in(files) == "sample")
    journal.phase("reward", 2)
    journal.phase("", 3, state=RunState.DONE)
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer):
            timer.join()
    assert read_progress(files.status).state == RunState.DONE
    journal.close()
