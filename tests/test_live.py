"""Bars of a campaign that runs: they follow the records, whatever ends while these are read."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from retrain.campaign.endings import Ending
from retrain.config.load import load_config
from retrain.plan.matrix import RunPlan, plan_runs
from retrain.records.layout import CampaignFiles
from retrain.records.metrics import MetricsEnds, MetricsWriter
from retrain.records.run_state import RunState
from retrain.render import live
from retrain.render.live import LiveView


@pytest.fixture
def runs(campaign_file: Path) -> tuple[RunPlan, ...]:
    return plan_runs(load_config(campaign_file)).runs


@pytest.fixture
def view(runs: tuple[RunPlan, ...], tmp_path: Path) -> LiveView:
    """A view of a campaign whose first run has taken 3 of its 4 steps."""
    files = CampaignFiles(tmp_path / "study")
    files.run(runs[0].run_id).directory.mkdir(parents=True)
    with MetricsWriter(files.run(runs[0].run_id).metrics, 1) as metrics:
        metrics.append({"step": 3, "mean_reward": 0.5})
    shown = LiveView(Console(file=io.StringIO()))
    shown.begun(files, runs, 2)
    shown.started(runs[0])
    return shown


def completed(view: LiveView) -> dict[str, float]:
    return {task.description: task.completed for task in view.bars.tasks}


def test_bars_follow_what_runs_have_written(view: LiveView) -> None:
    view.look()
    assert completed(view) == {"campaign": 3, "  grpo_s0": 3}


def test_a_run_that_ends_while_it_is_read_has_no_bar_any_more(
    view: LiveView, runs: tuple[RunPlan, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = live.read_ends

    def ends_meanwhile(path: Path, *wanted: object) -> MetricsEnds:
        rows = read(path, *wanted)
        view.ended(runs[0], Ending(RunState.DONE), ())
        return rows

    monkeypatch.setattr(live, "read_ends", ends_meanwhile)
    view.look()
    assert completed(view) == {"campaign": 4}


def test_a_run_that_is_tried_again_counts_once(view: LiveView, runs: tuple[RunPlan, ...]) -> None:
    view.look()
    view.retrying(runs[0], Ending(RunState.INFRASTRUCTURE, "lost"), 1.0)
    view.started(runs[0])
    view.look()
    assert completed(view) == {"campaign": 3, "  grpo_s0": 3}
