import os

import pytest

from retrain.base.errors import RecordsError
from retrain.base.locks import hold
from retrain.records.layout import RunFiles
from retrain.records.run_state import (
    Progress,
    RunState,
    begin_attempt,
    end_attempt,
    inspect_run,
    read_attempts,
    read_done,
    read_progress,
    write_done,
    write_progress,
)


@pytest.fixture
def run(tmp_path):
    return RunFiles(tmp_path)


def test_an_attempt_that_took_longer_than_any_number_has_no_duration(run):
    begin_attempt(run.attempts)
    end_attempt(run.attempts, 1, "done", duration_s=10**400)
    assert read_attempts(run.attempts)[0].duration_s is None


def test_attempts_are_numbered_from_one_and_remember_their_ends(run):
    assert begin_attempt(run.attempts) == 1
    end_attempt(run.attempts, 1, "infrastructure", exit_code=-9, message="killed", duration_s=1.5)
    assert begin_attempt(run.attempts, resumed_from_step=20) == 2
    first, second = read_attempts(run.attempts)
    assert (first.ending, first.exit_code, first.message, first.duration_s) == (
        "infrastructure",
        -9,
        "killed",
        1.5,
    )
    assert (second.number, second.resumed_from_step, second.pid, second.ending) == (2, 20, os.getpid(), None)


def test_the_last_ending_written_for_an_attempt_counts(run):
    begin_attempt(run.attempts)
    end_attempt(run.attempts, 1, "interrupted")  # its worker, which does not know why it was asked to leave
    end_attempt(run.attempts, 1, "timeout")  # the orchestrator, which does
    assert read_attempts(run.attempts)[0].ending == "timeout"


def test_attempts_survive_a_file_cut_anywhere(run):
    begin_attempt(run.attempts)
    end_attempt(run.attempts, 1, "failed")
    whole = run.attempts.read_bytes()
    for cut in range(0, len(whole) + 1, 3):
        run.attempts.write_bytes(whole[:cut])
        before = len(read_attempts(run.attempts))
        assert begin_attempt(run.attempts) == before + 1
        assert [a.number for a in read_attempts(run.attempts)] == list(range(1, before + 2))


def test_a_run_of_which_nothing_is_there_is_pending(run):
    assert inspect_run(RunFiles(run.directory / "missing")).state == RunState.PENDING
    assert inspect_run(run).state == RunState.PENDING


def test_a_run_is_running_only_while_its_lock_is_held(run):
    write_progress(run.status, Progress("running", "sample", 3, 10, 1))
    with hold(run.lock):
        begin_attempt(run.attempts)
        assert inspect_run(run).state == RunState.RUNNING
    assert inspect_run(run).state == RunState.DIED


@pytest.mark.parametrize("ending", ["failed", "infrastructure", "timeout", "stalled", "interrupted"])
def test_an_ended_run_is_what_its_last_attempt_ended_as(run, ending):
    begin_attempt(run.attempts)
    end_attempt(run.attempts, 1, "infrastructure")
    begin_attempt(run.attempts)
    end_attempt(run.attempts, 2, ending)
    assert inspect_run(run).state == ending


def test_a_run_is_done_only_for_the_config_that_it_finished(run):
    begin_attempt(run.attempts)
    end_attempt(run.attempts, 1, "done")
    write_done(run.done, "abc", {"eval_reward": 0.9})
    assert inspect_run(run, "abc").state == RunState.DONE
    assert inspect_run(run).state == RunState.DONE
    assert inspect_run(run, "other").state == RunState.PENDING
    assert read_done(run.done).result == {"eval_reward": 0.9}


def test_progress_is_read_back_with_its_time(run):
    write_progress(run.status, Progress("running", "train", 3, 10, 2, message="warming up"))
    progress = read_progress(run.status)
    assert (progress.phase, progress.step, progress.attempt, progress.message) == (
        "train",
        3,
        2,
        "warming up",
    )
    assert progress.updated_at.endswith("Z")


ENDLESS = '{"step": Infinity, "max_steps": 1, "state": "running"}'


@pytest.mark.parametrize(
    "content", ["{}", '{"step": "x", "max_steps": 1, "state": "running"}', ENDLESS, "torn"]
)
def test_a_status_that_is_none_is_an_error_with_its_path(run, content):
    run.status.write_text(content)
    with pytest.raises(RecordsError, match=r"status\.json"):
        read_progress(run.status)


@pytest.mark.parametrize("content", ["{}", "", '{"config_hash": "a', '{"config_hash": "a", "result": 1}'])
def test_a_done_file_that_says_nothing_of_a_config_is_named_with_what_to_do(run, content):
    run.done.write_text(content)
    with pytest.raises(RecordsError, match=r"done\.json: is damaged; remove it, and `retrain resume`"):
        inspect_run(run)
