"""Following a log ends when nobody is left who would write to it."""

from pathlib import Path

import pytest

from retrain.config.labels import label_of
from retrain.errors import RecordsError
from retrain.records.layout import CampaignFiles
from retrain.records.locks import hold
from retrain.status.logs import find_log, find_run
from tests.simulated import flat, write_campaign


@pytest.fixture
def campaign(tmp_path: Path) -> CampaignFiles:
    """A run that is done, and one that died."""
    runs = {("grpo", 0): flat(0.5), ("grpo", 1): flat(0.5, 3, ending="")}
    return CampaignFiles(write_campaign(tmp_path, runs))


def test_a_finished_runs_log_is_over_while_its_campaign_goes_on(campaign):
    with hold(campaign.lock):
        assert find_log(campaign.directory, "grpo_s0").is_over()


def test_a_dead_runs_log_may_go_on_while_its_campaign_could_start_it_again(campaign):
    log = find_log(campaign.directory, "grpo_s1")
    with hold(campaign.lock):
        assert not log.is_over()
    assert log.is_over()


def test_a_log_is_not_over_while_its_worker_lives(campaign):
    with hold(campaign.run("grpo_s0").lock):
        assert not find_log(campaign.directory, "grpo_s0").is_over()


def test_a_log_directory_offers_its_campaigns(campaign):
    with pytest.raises(RecordsError, match=f"log directory; name a campaign.*{campaign.directory.name}"):
        find_log(campaign.directory.parent)
    with pytest.raises(RecordsError, match="does not exist"):
        find_log(campaign.directory / "nowhere")


def test_a_run_is_found_by_its_conditions_own_name(tmp_path):
    runs = CampaignFiles(write_campaign(tmp_path, {(label_of("Контроль"), 0): flat(0.5)}))
    assert find_run(runs.directory, "Контроль_s0").directory.name == f"{label_of('Контроль')}_s0"
    with pytest.raises(RecordsError, match="has no run 'Другой_s0'"):
        find_run(runs.directory, "Другой_s0")
