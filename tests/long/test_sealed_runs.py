"""The rows of a finished run that are changed afterwards: found, named, counted nowhere, and made again."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_DONE, EXIT_RUN_FAILED
from retrain.campaign.run import reopen, start
from retrain.records.manifest import read_manifest, updated_entry
from retrain.records.metrics import read_metrics
from retrain.records.run_state import UNREADABLE, RunState, inspect_run, read_done
from retrain.results.report.gather import gather
from retrain.results.status import survey

Call = Callable[..., subprocess.CompletedProcess[str]]
WHEN = ("timestamp", "attempt", "_s", "tokens_per_second")


def cut(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))


def repeat_an_old_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:-1], lines[1], lines[-1]]))


def change_a_digit(path: Path) -> None:
    before = path.stat()
    text = path.read_text()
    path.write_text(text.replace('"mean_reward": 0', '"mean_reward": 1', 1))
    assert path.stat().st_size == before.st_size


DAMAGES = [cut, repeat_an_old_line, change_a_digit, Path.unlink]


@pytest.fixture
def campaign(campaign_file: Path) -> Path:
    """A finished campaign."""
    run = start(campaign_file, ["campaign.launcher=inline"])
    assert run.execute().exit_code == EXIT_DONE
    return run.directory


def states(campaign: Path) -> dict[str, str]:
    return {run.run_id: run.state for run in survey(campaign)[0].runs}


def measured(run: Path) -> list[dict[str, object]]:
    return [{k: v for k, v in row.items() if not k.endswith(WHEN)} for row in read_metrics(run)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_finished_run_whose_rows_changed_counts_nowhere_and_is_named(
    campaign: Path, retrain: Call, damage: Callable[[Path], object]
) -> None:
    damage(campaign / "runs" / "grpo_s0" / "metrics.jsonl")
    assert states(campaign) == dict.fromkeys(states(campaign), "done") | {"grpo_s0": UNREADABLE}
    table = retrain("export", campaign)
    assert {row["run"] for row in csv.DictReader(io.StringIO(table.stdout))} == {
        "grpo_s1",
        "maxrl_s0",
        "maxrl_s1",
    }
    compared = retrain("compare", campaign, "--json")
    (side, _) = json.loads(compared.stdout)["comparisons"][0]["metrics"][0]["sides"]
    assert (side["sample"]["n"], side["failed"]) == (1, 1)
    for said in (table.stderr, compared.stderr):
        assert "grpo_s0 is left out" in said
        assert "metrics.jsonl: changed after the run finished" in said
        assert f"`retrain resume {campaign} --failed`" in said


def test_resume_names_a_changed_run_and_runs_it_again_only_if_asked(campaign: Path, retrain: Call) -> None:
    run = campaign / "runs" / "grpo_s0"
    rows = measured(run)
    cut(run / "metrics.jsonl")
    left = retrain("resume", campaign)
    assert left.returncode == EXIT_RUN_FAILED
    assert left.stderr.count("grpo_s0 is left alone") == 1
    assert "2 of 4 rows are left" in left.stderr
    again = retrain("resume", campaign, "--failed")
    assert again.returncode == EXIT_DONE, again.stderr
    assert "grpo_s0 runs again from its start" in again.stderr
    assert measured(run) == rows
    assert len((run / "metrics.jsonl.damaged").read_text().splitlines()) == 2


def test_a_restored_file_makes_the_run_done_again(campaign: Path) -> None:
    path = campaign / "runs" / "grpo_s0" / "metrics.jsonl"
    kept = path.read_bytes()
    cut(path)
    assert states(campaign)["grpo_s0"] == UNREADABLE
    path.write_bytes(kept)
    assert states(campaign)["grpo_s0"] == "done"
    assert reopen(campaign).execute().exit_code == EXIT_DONE


def test_status_reads_no_rows_of_a_finished_run_whose_file_was_not_touched(campaign: Path) -> None:
    path = campaign / "runs" / "grpo_s0" / "metrics.jsonl"
    before = path.stat()
    change_a_digit(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nobody had
    assert states(campaign)["grpo_s0"] == "done"
    assert {run.run_id: run.state for run in gather(campaign).runs}["grpo_s0"] == UNREADABLE


def test_a_finished_run_of_an_earlier_version_has_no_digest_and_is_done(campaign: Path) -> None:
    run = reopen(campaign).files_of("grpo_s0")
    old = json.loads(run.done.read_text())
    del old["metrics"]
    run.done.write_text(json.dumps(old))
    found = read_done(run.done)
    assert found is not None
    assert found.metrics is None
    assert inspect_run(run).state is RunState.DONE


def test_a_finished_run_has_as_many_rows_as_it_took_steps(campaign: Path) -> None:
    run = reopen(campaign).files_of("grpo_s0")
    found = read_done(run.done)
    assert found is not None
    assert found.metrics is not None
    assert found.metrics.rows == 4
    assert found.metrics.bytes == run.metrics.stat().st_size
    manifest = read_manifest(campaign / "manifest.json")
    assert manifest is not None
    assert updated_entry(manifest.runs[0], run).reading == manifest.runs[0].reading
