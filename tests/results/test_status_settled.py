"""`status` of a large campaign opens only what changed since the manifest was written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.base.locks import hold
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.manifest import (
    Expectation,
    Manifest,
    new_manifest,
    read_manifest,
    refresh,
    with_plan,
    write_manifest,
)
from retrain.records.metrics import MetricsWriter
from retrain.records.run_row import RunEntry
from retrain.records.run_state import Progress, begin_attempt, end_attempt, write_done, write_progress
from retrain.records.spending import Spending, write_spending
from retrain.results.status import HELD_OUT, RunRow, survey
from retrain.results.status.watch import Watcher

PLANNED = [
    RunEntry(f"c_{name}", "c", seed, 3, "h")
    for seed, name in enumerate(("done", "bare", "failed", "silent", "stopped", "died", "waiting", "unknown"))
]
OPENED = """
import sys
from pathlib import Path
opened = set()
def note(event, arguments):
    if event == "open" and "/runs/" in str(arguments[0]):
        opened.add(Path(arguments[0]).parent.name)
sys.addaudithook(note)
from retrain.results.status import survey
survey(Path(sys.argv[1]))
print(" ".join(sorted(opened)))
"""


def row_kept(entry: RunEntry) -> RunRow | None:
    return entry.reading.row if entry.reading else None


def taken(files: RunFiles, steps: int = 3) -> None:
    begin_attempt(files.attempts)
    with MetricsWriter(files.metrics, attempt=1) as metrics:
        for step in range(1, steps + 1):
            metrics.append(
                {"step": step, "timestamp": f"2025-01-31T12:00:0{step}.000Z", "mean_reward": step / 4}
                | {"step_time_s": 1.5, "batch_size": 8, "bp_regime": "optimal", "bp_p_star": 64.5}
            )
    write_progress(files.status, Progress("running", "train", steps, 3, 1))


def ended(files: RunFiles, ending: str, message: str = "") -> None:
    taken(files)
    end_attempt(files.attempts, 1, ending, message=message, duration_s=4.0)


@pytest.fixture
def campaign(tmp_path: Path) -> CampaignFiles:
    """A campaign of which the manifest says how it is."""
    files = CampaignFiles(tmp_path / "study-20250131T120000Z-0a1b")
    for run in PLANNED:
        files.run(run.run_id).directory.mkdir(parents=True)
        files.run(run.run_id).run_toml.touch()
    files.campaign_toml.touch()
    ended(files.run("c_done"), "done")
    write_done(files.run("c_done").done, "h", {"eval_reward": 0.75})
    write_done(files.run("c_bare").done, "h", {})
    ended(files.run("c_failed"), "failed", "Traceback\nValueError: no such thing")
    ended(files.run("c_silent"), "stalled")
    files.run("c_silent").output_log.write_text("the last thing that it said\n")
    ended(files.run("c_stopped"), "interrupted")
    taken(files.run("c_died"))
    taken(files.run("c_unknown"))
    write_done(files.run("c_unknown").done, "another config", {})
    manifest = refresh(new_manifest("study", "hash", PLANNED, tmp_path), files)
    write_manifest(files.manifest, manifest)
    return files


def written(campaign: CampaignFiles) -> Manifest:
    manifest = read_manifest(campaign.manifest)
    assert manifest is not None
    return manifest


def rows(campaign: CampaignFiles) -> dict[str, RunRow]:
    (found,) = survey(campaign.directory)
    return {run.run_id: run for run in found.runs}


def opened(campaign: CampaignFiles) -> set[str]:
    answer = subprocess.run(
        [sys.executable, "-c", OPENED, str(campaign.directory)], check=True, capture_output=True, text=True
    )
    return set(answer.stdout.split())


def without_summaries(campaign: CampaignFiles) -> None:
    found = json.loads(campaign.manifest.read_text())
    for run in found["runs"]:
        run["settled"] = None
    campaign.manifest.write_text(json.dumps(found))


def test_a_manifest_sums_up_the_runs_that_are_over_and_is_read_back_as_written(
    campaign: CampaignFiles,
) -> None:
    manifest = written(campaign)
    settled = {run.run_id for run in manifest.runs if run.reading is not None}
    assert settled == {"c_done", "c_bare", "c_failed", "c_silent", "c_stopped"}
    write_manifest(campaign.manifest, manifest)
    assert read_manifest(campaign.manifest) == manifest


def test_the_rows_are_the_same_as_those_of_the_directories(campaign: CampaignFiles) -> None:
    from_manifest = rows(campaign)
    without_summaries(campaign)
    assert from_manifest == rows(campaign)
    assert (from_manifest["c_done"].eval_reward, from_manifest["c_done"].bp_p_star) == (0.75, 64.5)
    said = "ended without a message (killed?); last output: the last thing that it said"
    assert from_manifest["c_silent"].message == said


def test_no_file_of_a_run_that_was_over_is_opened(campaign: CampaignFiles) -> None:
    assert opened(campaign) == {"c_died", "c_unknown"}
    without_summaries(campaign)
    assert opened(campaign) == {run.run_id for run in PLANNED} - {"c_waiting"}


def test_a_run_that_is_taken_up_again_is_read_anew(campaign: CampaignFiles) -> None:
    run = campaign.run("c_failed")
    with hold(run.lock):  # type: ignore[union-attr]
        begin_attempt(run.attempts)
        assert opened(campaign) == {"c_died", "c_unknown", "c_failed"}
        assert (rows(campaign)["c_failed"].state, rows(campaign)["c_failed"].attempt) == ("running", 2)


def removed_done(files: RunFiles) -> None:
    files.done.unlink()


def replaced_done(files: RunFiles) -> None:
    write_done(files.done, "another config", {"eval_reward": 0.0})


def lost_everything(files: RunFiles) -> None:
    for path in files.directory.iterdir():
        path.unlink()


@pytest.mark.parametrize("change", [removed_done, replaced_done, lost_everything])
def test_a_finished_run_that_somebody_changed_is_not_shown_as_done(
    campaign: CampaignFiles, change: Callable[[RunFiles], None]
) -> None:
    change(campaign.run("c_done"))
    assert rows(campaign)["c_done"].state == "pending"


def test_a_campaign_copied_without_its_times_is_read_from_its_directories(campaign: CampaignFiles) -> None:
    before = rows(campaign)
    for path in campaign.runs.rglob("*"):
        os.utime(path, ns=(0, 0))
    assert "c_done" in opened(campaign)
    assert rows(campaign) == before


@pytest.mark.parametrize(
    "damage",
    [
        {},
        {"marks": 7},
        {"marks": [None]},
        {"marks": [[1], [2]]},
        {"summary": {}},
        {"summary": {"state": 3}},
        {"summary": {"state": "done", "reward_mean": "much"}},
        {"summary": {"state": "done", "reward_mean": float("inf")}},
        {"summary": {"state": "done", "step": True}},
        {"summary": {"state": "done", "invented": 1}},
        {"summary": {"state": "done", "pace": [0, 1.0, [1.0], None]}},
        {"summary": {"state": "done", "pace": [1, 1.0, [float("nan")], None]}},
    ],
)
def test_a_summary_that_is_damaged_is_not_believed(
    campaign: CampaignFiles, damage: dict[str, object]
) -> None:
    before = rows(campaign)
    found = json.loads(campaign.manifest.read_text())
    for run in found["runs"]:
        sound = run["settled"]
        run["settled"] = (
            sound | damage if isinstance(sound, dict) and isinstance(damage, dict) and damage else damage
        )
    campaign.manifest.write_text(json.dumps(found))
    assert all(run.reading is None for run in written(campaign).runs)
    assert rows(campaign) == before


@pytest.mark.parametrize("edit", [{"attempts": 9}, {"ended_at": 5}, {"result": {"eval_reward": 9.0}}])
def test_an_entry_that_was_edited_is_read_again_from_the_runs_own_files(
    campaign: CampaignFiles, edit: dict[str, object]
) -> None:
    before = written(campaign)
    manifest = json.loads(campaign.manifest.read_text())
    manifest["runs"] = [run | edit for run in manifest["runs"]]
    campaign.manifest.write_text(json.dumps(manifest))
    edited = written(campaign)
    assert all(run.reading is None for run in edited.runs)
    assert refresh(edited, campaign).runs == before.runs


def test_a_done_run_is_read_again_once_it_has_cost_more(campaign: CampaignFiles) -> None:
    before = written(campaign)
    write_spending(campaign.run("c_done"), Spending(usd=2.5))
    again = {run.run_id: run.reading for run in refresh(before, campaign).runs}
    assert (again["c_done"] and again["c_done"].row.cost_usd) == 2.5


def test_what_is_known_of_a_run_is_forgotten_when_its_config_changes(campaign: CampaignFiles) -> None:
    other = [RunEntry(run.run_id, run.condition, run.seed, 3, "other") for run in PLANNED]
    manifest = with_plan(written(campaign), "other", other)
    assert {(run.state, run.reading) for run in manifest.runs} == {("pending", None)}


def test_a_forecast_is_forgotten_once_there_are_more_runs_or_steps(campaign: CampaignFiles) -> None:
    manifest = replace(written(campaign), expected=Expectation(60.0, 70.0, 0.0, "a pilot"))
    assert with_plan(manifest, "hash", PLANNED).expected == manifest.expected
    assert with_plan(manifest, "hash", [replace(run, max_steps=99) for run in PLANNED]).expected is None
    assert with_plan(manifest, "hash", [*PLANNED, replace(PLANNED[0], run_id="new", seed=9)]).expected is None


def test_a_summary_is_kept_and_not_made_again_while_nothing_changed(campaign: CampaignFiles) -> None:
    manifest = written(campaign)
    again = refresh(manifest, campaign)
    assert [row_kept(new) is row_kept(old) for new, old in zip(again.runs, manifest.runs, strict=True)] == [
        True
    ] * len(PLANNED)


def test_a_run_without_an_evaluation_of_its_own_shows_that_of_an_eval_table(campaign: CampaignFiles) -> None:
    files = campaign.run("c_died")
    files.start.write_text(json.dumps({"metrics": {"eval_hard_reward": 0.25, "eval_hard_reward_se": None}}))
    with MetricsWriter(files.metrics, attempt=1) as metrics:
        row = {"step": 4, "timestamp": "2025-01-31T12:00:04.000Z", "mean_reward": None}
        metrics.append(row | {"eval_hard_reward": 0.5, "eval_hard_reward_se": 0.1})
    row, other = rows(campaign)["c_died"], rows(campaign)["c_done"]
    assert (row.named_eval, row.named_eval_start, row.named_eval_reward) == ("hard", 0.25, 0.5)
    assert (HELD_OUT.cell(row), HELD_OUT.cell(other)) == ("hard 0.25 -> 0.50", "0.75")
    (watched,) = Watcher(campaign.directory).refresh().campaigns
    assert next(run for run in watched.status.runs if run.run_id == "c_died") == row
