"""What manifest.json costs a campaign, however many runs it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.campaign import rollup
from retrain.campaign.rollup import RollUp
from retrain.records.layout import CampaignFiles
from retrain.records.manifest import Manifest, new_manifest, read_manifest, write_manifest
from retrain.records.run_row import PlannedRun
from retrain.records.run_state import RunState, begin_attempt, write_done


def roll_up(directory: Path, runs: int) -> RollUp:
    files = CampaignFiles(directory)
    planned = [PlannedRun(f"r{n}", "c", n, 1, "h") for n in range(runs)]
    for run in planned:
        files.run(run.run_id).directory.mkdir(parents=True)
    return RollUp(new_manifest("c", "h", planned, directory), files, print)


def end_all(made: RollUp, directory: Path, runs: int) -> None:
    for n in range(runs):
        files = CampaignFiles(directory).run(f"r{n}")
        begin_attempt(files.attempts)
        write_done(files.done, "h", {})
        made.changed(f"r{n}")
        made.keep()


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs each writing of a manifest held."""
    counts: list[int] = []

    def write(path: Path, manifest: Manifest) -> None:
        counts.append(len(manifest.runs))
        write_manifest(path, manifest)

    monkeypatch.setattr(rollup, "write_manifest", write)
    monkeypatch.setattr(rollup, "EVERY_S", 0.0)
    return counts


@pytest.mark.parametrize("runs", [40, 400])
def test_an_end_costs_the_same_however_many_runs_there_are(
    runs: int, written: list[int], tmp_path: Path
) -> None:
    made = roll_up(tmp_path, runs)
    made.write()
    end_all(made, tmp_path, runs)
    assert sum(written) / runs <= 1 + 1 / rollup.SHARE


def test_each_end_of_a_small_campaign_is_written_and_every_end_of_a_large_one_at_last(
    written: list[int], tmp_path: Path
) -> None:
    few = roll_up(tmp_path / "few", 3)
    few.write()
    end_all(few, tmp_path / "few", 3)
    assert len(written) == 4
    many = roll_up(tmp_path / "many", 90)
    many.write()
    end_all(many, tmp_path / "many", 90)
    many.write(ended=True)
    manifest = read_manifest(tmp_path / "many" / "manifest.json")
    assert manifest is not None
    assert {run.state for run in manifest.runs} == {RunState.DONE}
    assert manifest.ended_at


def test_only_runs_that_changed_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = roll_up(tmp_path, 30)
    made.write()
    looked: list[str] = []
    look_at = rollup.look_at
    monkeypatch.setattr(
        rollup, "look_at", lambda entry, files: looked.append(entry.run_id) or look_at(entry, files)
    )
    made.changed("r7")
    made.write()
    assert looked == ["r7"]
