"""status.json shows what a run is doing, also if it began a moment after something else."""

import re
import threading
import time
from contextlib import closing
from pathlib import Path

from retrain.backends.progress import (
    BackendProgress,
    OutageProgress,
    SamplingProgress,
    StartProgress,
    TrainingProgress,
)
from retrain.records.layout import RunFiles
from retrain.records.row_parts import EngineUse
from retrain.records.run_state import RunState, read_progress
from retrain.trainer import checkpoint, worker
from retrain.trainer.journal import Journal
from tests.semaphore_processes import wait_until
from tests.trainer.test_trainer import SMALL, make_run


def phase_in(files: RunFiles) -> str:
    found = read_progress(files.status)
    return found.phase if found else ""


def detail_in(files: RunFiles) -> str:
    found = read_progress(files.status)
    return found.detail if found else ""


def test_the_last_of_several_quick_phases_is_shown(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    journal = Journal(files, attempt=1, max_steps=3)
    journal.watch({})
    for phase in ("reward", "train", "sample"):
        journal.phase(phase, 1)
    wait_until(lambda: phase_in(files) == "sample")
    journal.phase("reward", 2)
    journal.phase("", 3, state=RunState.DONE)
    assert read_progress(files.status).state == RunState.DONE
    journal.close()


def test_a_phase_says_how_far_it_is_until_it_ends(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    journal = Journal(files, attempt=1, max_steps=3)
    journal.phase("sample", 1)
    sampling = SamplingProgress(rollouts=128, finished=37, tokens=4100, longest=210, time_s=20.0)
    assert told(journal, files, sampling) == ("sample", "37 of 128 done, 4,100 tokens, 205/s, longest 210")
    journal.phase("", 3, state=RunState.DONE)
    journal.detail(sampling)
    assert read_progress(files.status).detail == ""
    journal.close()


def told(journal: Journal, files: RunFiles, progress: BackendProgress) -> tuple[str, str]:
    """Return phase and detail in status.json, once it has been told how far the phase is."""
    wait_until(lambda: journal.detail(progress) or bool(read_progress(files.status).detail))
    found = read_progress(files.status)
    return found.phase, found.detail


def test_a_worker_that_waits_for_its_engine_has_a_phase_for_that(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    journal = Journal(files, attempt=1, max_steps=3)
    journal.phase("load", 0)
    assert told(journal, files, StartProgress("starting vLLM", 40.2)) == ("starting vLLM", "40 s")
    journal.close()


def test_an_outage_is_shown_while_it_lasts(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    journal = Journal(files, attempt=1, max_steps=3)
    journal.watch({})
    journal.phase("sample", 1)
    journal.detail(OutageProgress("API paused", "capacity", time.monotonic() - 240))
    wait_until(lambda: phase_in(files) == "API paused")
    assert re.fullmatch(r"capacity, 4 min( \d+ s)?", detail_in(files))
    journal.phase("train", 1)
    wait_until(lambda: phase_in(files) == "API paused")
    journal.detail(OutageProgress("API down", "ConnectError", time.monotonic()))  # the same, for run_timeout
    journal.detail(OutageProgress())
    wait_until(lambda: phase_in(files) == "train")
    journal.phase("train", 1, state=RunState.FAILED)
    assert 240 <= read_progress(files.status).paused_s < 480
    journal.close()


def test_a_throttle_that_says_how_long_it_has_paused_gets_no_second_time(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    with closing(Journal(files, attempt=1, max_steps=3)) as journal:
        journal.watch({})
        journal.phase("paused for 55 s: load 1.00", 0)
        begun = read_progress(files.status).updated_at
        wait_until(lambda: read_progress(files.status).updated_at > begun)
        assert detail_in(files) == ""


def test_what_an_engine_said_last_stays_while_the_run_goes_on(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    journal = Journal(files, attempt=1, max_steps=3)
    journal.detail(EngineUse(running=3, waiting=0, kv_fraction=None, tokens_per_s=None, server="/tmp/e.log"))
    journal.phase("sample", 1)
    journal.phase("train", 1, state=RunState.FAILED)
    said = read_progress(files.status)
    assert (said.engine, said.engine_server) == ("3 running, 0 waiting", "/tmp/e.log")
    journal.close()


def test_an_update_says_how_far_it_is_whoever_samples_beside_it(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    journal = Journal(files, attempt=1, max_steps=3)
    journal.phase("train", 1)
    later = SamplingProgress(rollouts=128, finished=37, tokens=4100, longest=210, time_s=20.0)

    def tell() -> bool:
        journal.detail(later)
        journal.detail(TrainingProgress(parts=17, done=3))
        return bool(read_progress(files.status).detail)

    wait_until(tell)
    assert read_progress(files.status).detail == "micro-batch 3 of 17 done"
    journal.close()


def test_a_phase_of_which_nothing_is_told_shows_its_seconds(tmp_path: Path) -> None:
    files, said = RunFiles(tmp_path), [""]
    with closing(Journal(files, attempt=1, max_steps=3)) as journal:
        journal.watch({"reward": lambda: said[0]})
        journal.phase("load", 0)
        wait_until(lambda: re.fullmatch(r"\d+ s", detail_in(files)))
        journal.phase("reward", 1)
        said[0] = "7 of 9 scored"
        wait_until(lambda: re.fullmatch(r"7 of 9 scored, \d+ s", detail_in(files)))


def test_a_slow_reward_says_how_many_completions_it_has_scored(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    reward = {"reward": "tests.plugins.held", "params": {"gate": str(gate)}}
    training = {**SMALL["training"], "eval_at_start": False}
    files = make_run(tmp_path / "r", {**SMALL, "training": training, "reward": reward})
    run = threading.Thread(target=worker.run, args=(files.directory, threading.Event()))
    run.start()
    try:
        wait_until(lambda: re.fullmatch(r"0 of 12 scored, \d+ s", detail_in(files)))
        assert phase_in(files) == "reward"
    finally:
        gate.touch()
        run.join()


def test_a_checkpoint_says_how_much_of_it_is_written(tmp_path: Path) -> None:
    said: list[str] = []

    def save_backend(directory: Path) -> None:
        (directory / "part").mkdir()
        for name in ("weights", "part/optimizer"):
            (directory / name).write_bytes(bytes(5 << 20))
            said.append(checkpoint.written(tmp_path))

    checkpoint.save(tmp_path, 1, {}, save_backend, keep=1)
    assert said == ["1 file, 5 MiB", "2 files, 10 MiB"]
    assert checkpoint.written(tmp_path) == ""
