import json
import subprocess
from dataclasses import asdict

import pytest

from retrain.base.errors import RecordsError
from retrain.records.decision import ConditionDecision, Decision, Looks
from retrain.records.files import record_of
from retrain.records.layout import CampaignFiles
from retrain.records.manifest import git_state, new_manifest, read_manifest, refresh, write_manifest
from retrain.records.run_row import RunEntry
from retrain.records.run_state import begin_attempt, end_attempt, write_done
from retrain.records.rungs import Searched

PLANNED = [RunEntry("a_s1", "a", 1, 10, "h1"), RunEntry("a_s2", "a", 2, 10, "h2")]


@pytest.fixture
def campaign(tmp_path):
    files = CampaignFiles(tmp_path)
    for run in PLANNED:
        files.run(run.run_id).directory.mkdir(parents=True)
    return files


def test_a_manifest_is_read_back_as_written(campaign):
    manifest = new_manifest("study", "hash", PLANNED, campaign.directory)
    write_manifest(campaign.manifest, manifest)
    assert read_manifest(campaign.manifest) == manifest
    assert [run.state for run in manifest.runs] == ["pending", "pending"]


def test_a_manifest_is_rebuilt_from_its_run_directories(campaign):
    finished, failed = (campaign.run(run.run_id) for run in PLANNED)
    begin_attempt(finished.attempts)
    write_done(finished.done, "h1", {"eval_reward": 1.0})
    begin_attempt(failed.attempts)
    end_attempt(failed.attempts, 1, "failed", message="no such task")
    manifest = refresh(new_manifest("study", "hash", PLANNED, campaign.directory), campaign, ended=True)
    assert [(r.state, r.attempts, r.message) for r in manifest.runs] == [
        ("done", 1, ""),
        ("failed", 1, "no such task"),
    ]
    assert manifest.runs[0].result == {"eval_reward": 1.0}
    assert manifest.ended_at


def test_a_run_that_cannot_be_read_says_so_without_hiding_the_others(campaign):
    campaign.run("a_s1").done.write_text("torn")
    manifest = refresh(new_manifest("study", "hash", PLANNED, campaign.directory), campaign)
    assert "done.json" in manifest.runs[0].message
    assert manifest.runs[1].state == "pending"


@pytest.mark.parametrize(
    "damage", [{"schema_version": 99}, {"runs": [{"run_id": 1}]}, {"runs": 3}, {"git": 7}]
)
def test_a_manifest_that_is_none_is_an_error_with_its_path(campaign, damage):
    write_manifest(campaign.manifest, new_manifest("study", "hash", PLANNED, campaign.directory))
    content = json.loads(campaign.manifest.read_text())
    campaign.manifest.write_text(json.dumps(content | damage))
    with pytest.raises(RecordsError, match=r"manifest\.json"):
        read_manifest(campaign.manifest)


def test_a_repository_tells_its_commit_and_whether_files_differ(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    (tmp_path / "f").write_text("1")
    for arguments in (["init", "-q"], ["add", "f"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], check=True)
    clean = git_state(tmp_path)
    (tmp_path / "f").write_text("2")
    assert len(clean.commit) == 40
    assert (clean.is_dirty, git_state(tmp_path).is_dirty) == (False, True)


def test_outside_a_repository_there_is_no_commit(tmp_path):
    assert git_state(tmp_path) is None


def test_a_record_is_built_with_all_that_it_holds():
    found = Decision(
        "eval_reward", "base", 0.05, 8, 6, 2, "decided",
        conditions=(ConditionDecision("other", "better", 3, 0.5, low=None),), changes=("a", "b"),
    )  # fmt: skip
    told = json.loads(json.dumps(asdict(found))) | {"a key of another version": 1}
    assert record_of(Decision, told) == found
    assert record_of(Looks, {"design": {"error": 0.05}}) == Looks({"error": 0.05})
    with pytest.raises(ValueError, match="shorter"):
        record_of(Searched, {"metric": "a", "reference": "b", "seeds": [1], "stages": [[4]]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"conditions": 3},
        {"conditions": [3]},
        {"conditions": [{}]},
        {"changes": None},
        {"error": []},
        {"error": "x"},
    ],
)
def test_a_record_with_a_wrong_value_is_refused(wrong):
    whole = Decision("eval_reward", "base", 0.05, 8, 6, 2, "decided")
    with pytest.raises((LookupError, TypeError, ValueError)):
        record_of(Decision, asdict(whole) | wrong)


def test_rows_that_cannot_be_read_do_not_hold_up_a_run_that_has_not_begun(campaign: CampaignFiles) -> None:
    files = campaign.run(PLANNED[0].run_id)
    files.directory.mkdir(parents=True, exist_ok=True)
    files.metrics.mkdir()
    manifest = refresh(new_manifest("study", "hash", PLANNED, campaign.directory), campaign)
    assert manifest.runs[0].state == "pending"
