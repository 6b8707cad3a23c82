"""The retry policy: which ending is retried, how often, and after how long."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.campaign.endings import Ending
from retrain.campaign.run import start
from retrain.campaign.supervise import LONGEST_RETRY_S, RetryPolicy, is_retried
from retrain.records.run_state import RunState, begin_attempt


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
