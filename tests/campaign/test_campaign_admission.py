"""When a worker may start: enough memory is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.base.errors import ConfigError
from retrain.campaign import Observer
from retrain.campaign.admission import Places, as_planned, by_memory
from retrain.campaign.run import reopen, start
from retrain.control.machine import memory_limit_bytes
from retrain.records.layout import CampaignFiles
from retrain.records.run_state import RunState


def test_no_worker_is_started_while_memory_is_short() -> None:
    free_bytes = 2**30
    admission = by_memory(as_planned(4), least_bytes=2**31, free_bytes=lambda: free_bytes)
    short = admission()
    assert short.count == 0
    assert short.reason == "1.00 GiB of memory are free, min_free_memory is 2.00"
    free_bytes = 2**32
    assert admission() == Places(4)


def test_a_campaign_with_too_little_memory_says_so_and_waits(campaign_file: Path) -> None:
    notices: list[str] = []

    class Impatient(Observer):
        def notice(self, text: str) -> None:
            notices.append(text)
            campaign.stop()

    campaign = start(campaign_file, [f"campaign.min_free_memory={memory_limit_bytes()}"], Impatient())
    outcome = campaign.execute()
    assert set(outcome.states.values()) == {RunState.PENDING}
    assert notices[0].startswith("no run is started for now: ")
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
