"""The retry policy: which ending is retried, how often, after how long, and when launching pauses."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.campaign.admission import as_planned
from retrain.campaign.endings import Ending
from retrain.campaign.run import start
from retrain.campaign.supervise import LONGEST_RETRY_S, SAME_LOSS_S, LaunchBreaker, RetryPolicy, is_retried
from retrain.records.run_state import RunState, begin_attempt

FIRST_PAUSE_S = 60.0  # of a circuit breaker; each later one is twice as long


@pytest.mark.parametrize("state", RunState)
def test_only_what_may_pass_by_itself_is_retried(state: RunState) -> None:
    retried = {RunState.INFRASTRUCTURE, RunState.STALLED}
    assert is_retried(Ending(state), cut_short=False) is (state in retried)
    assert is_retried(Ending(state), cut_short=True) is (state in retried | {RunState.INTERRUPTED})
    assert not is_retried(Ending(state, is_lasting=True), cut_short=False)


def test_delays_double_with_jitter_to_a_longest_and_end_after_the_retries(campaign_file: Path) -> None:
    campaign = start(campaign_file)
    run = campaign.plan.runs[0]
    files, policy = campaign.files_of(run.run_id), RetryPolicy(retries=10)
    policy.launched(run.run_id, files)
    for attempt in range(10):
        delay_s = policy.ended(run, Ending(RunState.INFRASTRUCTURE), files)
        doubled = min(LONGEST_RETRY_S, 2.0**attempt)
        assert delay_s is not None
        assert 0.5 * doubled <= delay_s <= 1.5 * doubled
    assert policy.ended(run, Ending(RunState.INFRASTRUCTURE), files) is None


def test_a_finished_run_that_goes_on_has_all_its_retries_again(campaign_file: Path) -> None:
    campaign = start(campaign_file)
    run = campaign.plan.runs[0]
    files, policy = campaign.files_of(run.run_id), RetryPolicy(retries=1)
    for _ in range(2):
        policy.launched(run.run_id, files)
        begin_attempt(files.attempts)
        assert policy.ended(run, Ending(RunState.INFRASTRUCTURE), files) is not None
        policy.launched(run.run_id, files)
        begin_attempt(files.attempts)
        assert policy.ended(run, Ending(RunState.DONE), files) is None


def in_a_row(runs: int = 3) -> tuple[LaunchBreaker, list[float]]:
    now_s = [0.0]
    return LaunchBreaker(as_planned(4), runs, clock=lambda: now_s[0]), now_s


def test_several_runs_failing_in_a_row_pause_launches_then_one_is_tried() -> None:
    admission, now_s = in_a_row()
    for run_id in ("a", "b", "c"):
        assert admission.places().count == 4
        admission.ended(run_id, Ending(RunState.INFRASTRUCTURE, "connection refused"))
    paused = admission.places()
    assert (paused.count, "connection refused" in paused.reason) == (0, True)
    now_s[0] += FIRST_PAUSE_S
    assert admission.places().count == 4
    admission.launched("a")
    assert admission.places().count == 0  # until the one that is tried has lived for a while
    admission.ended("a", Ending(RunState.DONE, ""))
    assert admission.places().count == 4


def test_a_probe_that_fails_like_the_others_pauses_for_longer() -> None:
    admission, now_s = in_a_row()
    for run_id in ("a", "b", "c"):
        admission.ended(run_id, Ending(RunState.INFRASTRUCTURE, ""))
    now_s[0] += FIRST_PAUSE_S
    assert admission.places().count == 4
    admission.launched("a")
    admission.ended("a", Ending(RunState.INFRASTRUCTURE, ""))
    now_s[0] += FIRST_PAUSE_S
    assert admission.places().count == 0
    now_s[0] += FIRST_PAUSE_S
    assert admission.places().count == 4


def test_a_probe_counts_though_it_failed_in_the_pause_and_others_do_not() -> None:
    admission, now_s = in_a_row()
    for run_id in ("a", "b", "c", "in the pause"):
        admission.ended(run_id, Ending(RunState.INFRASTRUCTURE, ""))
    now_s[0] += FIRST_PAUSE_S
    admission.launched("in the pause")
    admission.ended("another", Ending(RunState.INFRASTRUCTURE, ""))
    assert admission.places().reason.startswith("one run is probing")
    admission.ended("in the pause", Ending(RunState.INFRASTRUCTURE, "no route to host"), is_lost=True)
    assert "no route to host" in admission.places().reason
    now_s[0] += 2 * FIRST_PAUSE_S - 1
    assert admission.places().count == 0


def test_one_run_that_fails_again_and_again_is_no_sign_of_trouble_for_all() -> None:
    admission, _ = in_a_row()
    for _ in range(10):
        admission.ended("a", Ending(RunState.INFRASTRUCTURE, ""))
    assert admission.places().count == 4


def test_what_we_interrupt_ourselves_is_neither_failure_nor_success() -> None:
    admission, _ = in_a_row()
    for run_id in ("a", "b"):
        admission.ended(run_id, Ending(RunState.INFRASTRUCTURE, ""))
    admission.ended("d", Ending(RunState.INTERRUPTED, ""))
    admission.ended("c", Ending(RunState.INFRASTRUCTURE, ""))
    assert admission.places().count == 0


def test_runs_that_are_lost_with_one_machine_count_as_one() -> None:
    admission, now_s = in_a_row()
    for run_id in ("a", "b", "c", "d"):
        admission.ended(run_id, Ending(RunState.INFRASTRUCTURE, "NODE_FAIL"), is_lost=True)
        now_s[0] += 5.0  # their leases run out one after the other
    assert admission.places().count == 4


def test_machines_lost_one_after_another_pause_launches() -> None:
    admission, now_s = in_a_row()
    for run_id in ("a", "b", "c"):
        admission.ended(run_id, Ending(RunState.INFRASTRUCTURE, "NODE_FAIL"), is_lost=True)
        now_s[0] += SAME_LOSS_S
    assert admission.places().count == 0


def test_workers_that_fail_by_themselves_beside_a_lost_machine_count_each() -> None:
    admission, _ = in_a_row()
    admission.ended("a", Ending(RunState.INFRASTRUCTURE, "NODE_FAIL"), is_lost=True)
    admission.ended("b", Ending(RunState.INFRASTRUCTURE, "connection refused"))
    admission.ended("c", Ending(RunState.INFRASTRUCTURE, "connection refused"))
    assert admission.places().count == 0
