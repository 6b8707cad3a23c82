"""What manifest.json costs a campaign, however many runs it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.campaign import rollup
from retrain.campaign.rollup import RollUp
from retrain.records.layout import CampaignFiles
from retrain.records.manifest import Manifest, new_manifest, read_manifest
from retrain.records.run_row import RunEntry
from retrain.records.run_state import RunState, begin_attempt, write_done


def roll_up(directory: Path, runs: int) -> RollUp:
    files = CampaignFiles(directory)
    planned = [RunEntry(f"r{n}", "c", n, 1, "h") for n in range(runs)]
    for run in planned:
        files.run(run.run_id).directory.mkdir(parents=True)
    return RollUp(new_manifest("c", "h", planned, directory), files, print)


def end(made: RollUp, run_id: str) -> None:
    """Have a run finish, and the campaign notice."""
    files = made.files.run(run_id)
    begin_attempt(files.attempts)
    write_done(files.done, "h", {})
    made.changed(run_id)


def end_all(made: RollUp) -> list[int]:
    """Have each run finish; return how many runs each manifest held that was written then."""
    path, written = made.files.manifest, []
    for run in made.manifest.runs:
        before = path.stat()
        end(made, run.run_id)
        made.keep()
        now = path.stat()
        if (now.st_ino, now.st_mtime_ns) != (before.st_ino, before.st_mtime_ns):
            written.append(len(manifest_in(path).runs))
    return written


def manifest_in(path: Path) -> Manifest:
    found = read_manifest(path)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollup, "EVERY_S", 0.0)


@pytest.mark.parametrize("runs", [40, 400])
def test_an_end_costs_the_same_however_many_runs_there_are(runs: int, tmp_path: Path) -> None:
    made = roll_up(tmp_path, runs)
    made.write()
    assert 0 < sum(end_all(made)) / runs <= 1 / rollup.SHARE


def test_each_end_of_a_small_campaign_is_written_and_every_end_of_a_large_one_at_last(tmp_path: Path) -> None:
    few = roll_up(tmp_path / "few", 3)
    few.write()
    assert end_all(few) == [3] * 3
    many = roll_up(tmp_path / "many", 90)
    many.write()
    end_all(many)
    many.write(ended=True)
    manifest = manifest_in(tmp_path / "many" / "manifest.json")
    assert {run.state for run in manifest.runs} == {RunState.DONE}
    assert manifest.ended_at


def test_only_runs_that_changed_are_looked_at(tmp_path: Path) -> None:
    made = roll_up(tmp_path, 30)
    made.write()
    end(made, "r7")
    write_done(made.files.run("r8").done, "h", {})  # of which the campaign knows nothing
    made.write()
    states = {run.run_id: run.state for run in manifest_in(made.files.manifest).runs}
    assert [run_id for run_id, state in states.items() if state == RunState.DONE] == ["r7"]
