"""How many workers a campaign runs at a time follows the load of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from retrain.base.errors import ConfigError
from retrain.campaign import Observer
from retrain.campaign.endings import Ending
from retrain.campaign.run import run_campaign
from retrain.plan.matrix import RunPlan
from retrain.records.metrics import read_metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _plugins_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT))


def test_admission_follows_the_load_and_running_workers_are_left_alone(
    campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = here / "load"
    load.write_text("0.4")  # reduced: half of the workers
    monkeypatch.setenv("LOAD_FILE", str(load))
    text = campaign_file.read_text().replace("max_workers = 2", "max_workers = 4")
    campaign_file.write_text(
        text + '[throttle]\nenabled = true\nload_fn = "tests.plugins.loads_from_a_file"\n'
    )
    watcher = CountActive()
    assert run_campaign(campaign_file, observer=watcher).exit_code == 0
    assert watcher.most == 2
    assert any("2 workers at a time for now" in said for said in watcher.notices)


def test_a_load_function_that_raises_restricts_a_campaign_and_does_not_end_it(
    campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOAD_FILE", str(here / "nothing here"))
    text = campaign_file.read_text().replace("max_workers = 2", "max_workers = 4")
    table = '[throttle]\nenabled = true\non_unknown = "reduced"\n'
    campaign_file.write_text(text + table + 'load_fn = "tests.plugins.loads_from_a_file"\n')
    watcher = CountActive()
    outcome = run_campaign(campaign_file, observer=watcher)
    assert outcome.exit_code == 0
    assert watcher.most == 2  # half of the workers
    assert any("raised FileNotFoundError" in said for said in watcher.notices)
    for run in (outcome.directory / "runs").iterdir():
        assert {row["throttle_level"] for row in read_metrics(run)} == {"reduced"}


def test_a_load_function_that_returns_no_number_ends_a_campaign_as_a_configuration_error(
    campaign_file: Path,
) -> None:
    table = '[throttle]\nenabled = true\nload_fn = "platform.python_version"\n'
    campaign_file.write_text(campaign_file.read_text() + table)
    with pytest.raises(ConfigError, match=r"\[throttle\].load_fn\) returned '3\."):
        run_campaign(campaign_file, observer=Observer())


class CountActive(Observer):
    """Counts how many workers run at a time."""

    def __init__(self) -> None:
        self.active = self.most = 0
        self.notices: list[str] = []

    def started(self, run: RunPlan) -> None:
        self.active += 1
        self.most = max(self.most, self.active)

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        self.active -= 1

    def notice(self, text: str) -> None:
        self.notices.append(text)
