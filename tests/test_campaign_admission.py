"""When a worker may start: enough memory is free, and runs in a row do not fail for their surroundings."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.campaign.admission import ByMemory, Places, Planned
from retrain.campaign.endings import Ending
from retrain.campaign.events import Silent
from retrain.campaign.retry import SAME_LOSS_S, LaunchBreaker
from retrain.campaign.run import reopen, start
from retrain.errors import ConfigError
from retrain.records.layout import CampaignFiles
from retrain.records.run_state import RunState
from retrain.system import memory_limit_bytes


def test_no_worker_is_started_while_memory_is_short() -> None:
    free_bytes = 2**30
    admission = ByMemory(Planned(4), least_bytes=2**31, free_bytes=lambda: free_bytes)
    short = admission.places()
    assert (short.count, short.ask_again_s is not None) == (0, True)
    assert short.reason == "1.00 GiB of memory are free, min_free_memory is 2.00"
    free_bytes = 2**32
    assert admission.places() == Places(4, None)


def test_a_campaign_with_too_little_memory_says_so_and_waits(campaign_file: Path) -> None:
    notices: list[str] = []

    class Impatient(Silent):
        def notice(self, text: str) -> None:
            notices.append(text)
            campaign.stop()

    campaign = start(campaign_file, [f"campaign.min_free_memory={memory_limit_bytes()}"], Impatient())
    outcome = campaign.execute()
    assert set(outcome.states.values()) == {RunState.PENDING}
    assert "min_free_memory" in notices[0]


def test_a_minimum_that_no_machine_can_meet_is_refused_before_anything_exists(campaign_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"min_free_memory: got 931322574\.62 GiB; this machine"):
        start(campaign_file, ["campaign.min_free_memory=1e18"])
    assert not (campaign_file.parent / "logs").exists()


def test_a_campaign_on_a_smaller_machine_than_it_began_on_is_refused_with_what_to_change(
    campaign_file: Path,
) -> None:
    campaign = start(campaign_file)
    files = CampaignFiles(campaign.directory)
    text = files.campaign_toml.read_text()
    files.campaign_toml.write_text(text.replace("[campaign]\n", "[campaign]\nmin_free_memory = 1e18\n"))
    with pytest.raises(ConfigError, match=r"campaign\.toml \[campaign\]\.min_free_memory: got"):
        reopen(campaign.directory)


def in_a_row(runs: int = 3) -> tuple[LaunchBreaker, list[float]]:
    now_s = [0.0]
    return LaunchBreaker(Planned(4), runs, clock=lambda: now_s[0]), now_s


def test_several_runs_failing_in_a_row_pause_launches_then_one_is_tried() -> None:
    admission, now_s = in_a_row()
    for run_id in ("a", "b", "c"):
        assert admission.places().count == 4
        admission.ended(run_id, Ending(RunState.INFRASTRUCTURE, "connection refused"))
    paused = admission.places()
    assert (paused.count, "connection refused" in paused.reason) == (0, True)
    assert paused.ask_again_s is not None
    now_s[0] += paused.ask_again_s
    assert admission.places().count == 4
    admission.started()
    assert admission.places().count == 0  # until the one that is tried has lived for a while
    admission.ended("a", Ending(RunState.DONE, ""))
    assert admission.places().count == 4


def test_a_probe_that_fails_like_the_others_pauses_for_longer() -> None:
    admission, now_s = in_a_row()
    for run_id in ("a", "b", "c"):
        admission.ended(run_id, Ending(RunState.INFRASTRUCTURE, ""))
    first_s = admission.places().ask_again_s
    assert first_s is not None
    now_s[0] += first_s
    admission.started()
    admission.ended("a", Ending(RunState.INFRASTRUCTURE, ""))
    second_s = admission.places().ask_again_s
    assert second_s is not None
    assert second_s > first_s


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
