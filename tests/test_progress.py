"""status.json shows what a run is doing, also if it began a moment after something else."""

import threading
from pathlib import Path

from retrain.backends import SamplingProgress
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


def test_a_phase_says_how_far_it_is_until_it_ends(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    journal = Journal(files, attempt=1, max_steps=3)
    journal.phase("sample", 1)
    progress = SamplingProgress(rollouts=128, finished=37, tokens=4100, longest=210, time_s=20.0)

    def tell() -> bool:
        journal.detail(progress)
        found = read_progress(files.status)
        said = (found.phase, found.detail) if found else None
        return said == ("sample", "37 of 128 done, 4,100 tokens, 205/s, longest 210")

    wait_until(tell)
    journal.phase("", 3, state=RunState.DONE)
    journal.detail(progress)
    assert read_progress(files.status).detail == ""
    journal.close()
