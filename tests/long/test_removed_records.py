"""Records that are removed while a campaign writes them: an error, and never a finished run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_RUN_FAILED, RecordsError
from retrain.campaign import Observer
from retrain.campaign.forecast import Forecaster
from retrain.campaign.run import start
from retrain.plan.matrix import RunPlan
from retrain.records.manifest import Expectation
from retrain.records.metrics import MetricsWriter

VANDAL = """
import shutil
from pathlib import Path
def score(completion, prompt):
    for name in Path("victims.txt").read_text().split():
        shutil.rmtree(name, ignore_errors=True)
        Path(name).unlink(missing_ok=True)
    return 0.0
"""


class Removing(Observer):
    """Removes the campaign's directory as soon as its first worker has been started."""

    directory = Path()
    leaves_another = False

    def started(self, run: RunPlan) -> None:
        del run
        if (self.directory / "campaign.toml").exists():
            aside = self.directory.rename(self.directory.with_name("gone"))  # so that no writer is in the way
            shutil.rmtree(aside, ignore_errors=True)
            if self.leaves_another:
                self.directory.mkdir()


def test_a_campaign_whose_directory_is_removed_ends_with_an_error(campaign_file: Path) -> None:
    observer = Removing()
    campaign = start(campaign_file, observer=observer)
    observer.directory = campaign.directory
    with pytest.raises(RecordsError, match="was removed or replaced while the campaign ran"):
        campaign.execute()
    assert not campaign.directory.exists()


def test_nothing_is_written_into_a_directory_that_took_the_campaigns_place(
    campaign_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = Removing()
    campaign = start(campaign_file, observer=observer)
    observer.directory = campaign.directory
    observer.leaves_another = True
    monkeypatch.setattr(Forecaster, "update", lambda forecaster: Expectation(1.0, 2.0, 0.0, "a pilot"))
    with pytest.raises(RecordsError, match="was removed or replaced while the campaign ran"):
        campaign.execute()
    assert list(campaign.directory.iterdir()) == []


@pytest.mark.parametrize("what", ["metrics.jsonl", "the whole directory"])
def test_a_run_whose_files_are_removed_while_it_runs_is_not_done(
    campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.syspath_prepend(here)
    (here / "vandal.py").write_text(VANDAL)
    (here / "victims.txt").write_text("")
    settings = ["campaign.seeds=[0]", "campaign.launcher=inline", "reward.reward=vandal.score"]
    campaign = start(campaign_file, settings)
    run = campaign.files_of("grpo_s0")
    (here / "victims.txt").write_text(str(run.metrics if what == "metrics.jsonl" else run.directory))
    outcome = campaign.execute()
    assert outcome.exit_code == EXIT_RUN_FAILED
    assert not run.done.exists()


def test_no_row_is_written_into_a_file_that_nobody_can_find(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl", 1) as rows:
        rows.append({"step": 1})
        (tmp_path / "metrics.jsonl").unlink()
        with pytest.raises(RecordsError, match=r"metrics\.jsonl: was removed"):
            rows.append({"step": 2})


def test_rows_are_not_called_safe_in_a_file_that_was_moved(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl", 1) as rows:
        rows.append({"step": 1})
        (tmp_path / "metrics.jsonl").rename(tmp_path / "elsewhere.jsonl")
        with pytest.raises(RecordsError, match=r"metrics\.jsonl: was removed"):
            rows.sync()
