"""A directory that an earlier version left must load in every view.

`tests/data/logs-<version>` are real campaigns, recorded by that version and never edited since, but for the
names of host and folders: two conditions that went well, one whose reward failed. Each format that changes
gets another directory beside them.
"""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from retrain.campaign.run import reopen
from retrain.config import keys
from retrain.config.digest import is_as_written
from retrain.plan import build
from retrain.records import provenance
from retrain.records.layout import CampaignFiles
from retrain.records.metrics import read_metrics
from retrain.records.provenance import known_origin
from retrain.records.run_state import read_attempts
from retrain.results.status import survey
from retrain.results.status.watch import Watcher
from tests.long.test_damaged_origins import Notes

OLD = sorted((Path(__file__).parents[1] / "data").glob("logs-*"))
PLUGINS = {
    "my_rewards.py": "def score(completions, trainer_state, **columns):\n"
    "    return [sum(map(ord, completion)) % 5 / 4 for completion in completions]\n",
    "my_load.py": "def load():\n    return 0.7\n",
}
UNDISTURBED = {  # loss and norm of the gradient in the last steps of the same runs with these plugins
    "broken_s0": [
        (-0.20707031532938155, 0.09454602003097534),
        (-0.12554072611955505, 0.07744943350553513),
        (-0.11627872868317932, 0.10257215052843094),
    ],
    "broken_s1": [
        (-0.14677179115154898, 0.07985531538724899),
        (-0.03488367441866044, 0.049945127218961716),
        (0.007255571748721762, 0.06181159242987633),
    ],
}
VIEWS = {
    "status": ["status", "{logs}"],
    "status of a campaign": ["status", "{campaign}", "--json"],
    "watch": ["status", "{logs}", "--watch"],
    "watch as JSON": ["status", "{logs}", "--watch", "--json"],
    "samples": ["samples", "{campaign}", "maxrl_s0"],
    "ties": ["samples", "{campaign}", "baseline_s1", "--ties", "--json"],
    "a run's log": ["logs", "{campaign}", "broken_s0"],
    "the orchestrator's log": ["logs", "{campaign}"],
    "compare": ["compare", "{campaign}", "baseline", "maxrl"],
    "export": ["export", "{campaign}"],
    "estimate": ["explain", "{campaign}/campaign.toml", "--from", "{logs}"],
}


@pytest.fixture(params=OLD, ids=lambda path: path.name)
def old(request, here):
    """A copy of the recorded directory, in a directory where its plugins are found."""
    for name, text in PLUGINS.items():
        (here / name).write_text(text)
    return Path(shutil.copytree(request.param, here / "logs"))


def only_campaign(logs):
    (campaign,) = logs.iterdir()
    return CampaignFiles(campaign)


def test_there_is_an_old_directory():
    assert OLD


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_loads_it(old, retrain, view):
    campaign = only_campaign(old).directory
    result = retrain(*(part.format(logs=old, campaign=campaign) for part in VIEWS[view]))
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_it_says_what_happened_then(old):
    (seen,) = survey(old)
    states = {run.run_id: (run.state, run.step, run.attempt) for run in seen.runs}
    well, badly = ("done", 6, 1), ("infrastructure", 3, 2)
    assert states == {
        **dict.fromkeys(("baseline_s0", "baseline_s1", "maxrl_s0", "maxrl_s1"), well),
        **dict.fromkeys(("broken_s0", "broken_s1"), badly),
    }
    broken = next(run for run in seen.runs if (run.condition, run.seed) == ("broken", 0))
    assert broken.message == (
        "my_rewards.py:3: ConnectionError: judge.example: connection refused; raised by the reward "
        "'my_rewards.score'"
    )
    assert broken.throttle_level == "minimal"


def test_its_rows_and_attempts_are_read(old):
    files = only_campaign(old)
    assert [row["step"] for row in read_metrics(files.run("maxrl_s0").directory)] == [1, 2, 3, 4, 5, 6]
    assert [attempt.ending for attempt in read_attempts(files.run("broken_s1").attempts)] == [
        "infrastructure",
        "infrastructure",
    ]


def test_watching_tells_its_retries_and_its_throttle(old):
    told = {(one.run_id, one.kind) for one in Watcher(old).refresh().events}
    assert {("broken_s0", "retried"), ("broken_s0", "throttle"), ("maxrl_s1", "done")} <= told


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_survives_its_corruption(old, retrain, view):
    for path in sorted(old.rglob("*.jsonl")):
        path.write_bytes(path.read_bytes()[:-7] + b"\n\0\xff{[\n[1]\n")
    campaign = only_campaign(old).directory
    result = retrain(*(part.format(logs=old, campaign=campaign) for part in VIEWS[view]))
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


def test_json_rows_are_json(old, retrain):
    lines = retrain("status", old, "--watch", "--json").stdout.splitlines()
    assert {json.loads(line)["kind"] for line in lines} == {"run", "campaign", "event"}


def reopened(logs, retrain, *, inline=True):
    """Resume the campaign on the command line; its reward works by now."""
    campaign = only_campaign(logs)
    if inline:  # which may change, and starts no worker
        text = campaign.campaign_toml.read_text()
        campaign.campaign_toml.write_text(text.replace("[campaign]", '[campaign]\nlauncher = "inline"'))
    result = retrain("resume", campaign.directory)
    assert result.returncode == 0, result.stderr
    return campaign, result.stderr


def test_it_is_resumed_and_ends(old, retrain):
    campaign, said = reopened(old, retrain, inline=False)
    assert "4 finished runs skipped" in said
    (seen,) = survey(old)
    assert {run.state for run in seen.runs} == {"done"}
    assert len(read_attempts(campaign.run("maxrl_s0").attempts)) == 1
    for run, wanted in UNDISTURBED.items():
        attempts = read_attempts(campaign.run(run).attempts)
        assert [attempt.resumed_from_step for attempt in attempts] == [0, 2, 2]
        rows = read_metrics(campaign.run(run).directory)[3:]
        assert [(row["loss"], row["grad_norm"]) for row in rows] == [pytest.approx(pair) for pair in wanted]


@pytest.mark.parametrize("lost", ["origin.json", "manifest.json"])
def test_it_is_resumed_without(lost, old, retrain):
    (only_campaign(old).directory / lost).unlink()
    campaign, said = reopened(old, retrain)
    assert "4 finished runs skipped" in said
    assert (campaign.directory / lost).exists()


def test_it_is_resumed_after_a_kill_halfway_through_bringing_it_up_to_date(old, retrain):
    campaign = only_campaign(old)
    manifest = campaign.manifest.read_bytes()
    reopened(old, retrain)
    campaign.manifest.write_bytes(manifest)
    _, said = reopened(old, retrain, inline=False)
    assert "6 finished runs skipped" in said


def test_a_changed_file_is_told_key_by_key(old, retrain):
    campaign = only_campaign(old)
    campaign.campaign_toml.write_text(campaign.campaign_toml.read_text().replace("lr = 5e-3", "lr = 0.5"))
    result = retrain("resume", campaign.directory)
    assert result.returncode == 2
    assert "training.lr: 0.005 -> 0.5 (baseline_s0, maxrl_s0, broken_s0 and 3 more)" in result.stderr


def test_an_edited_run_is_written_again(old, retrain):
    files = only_campaign(old).run("broken_s0")
    files.run_toml.write_text(files.run_toml.read_text().replace("lr = 0.005", "lr = 0.5"))
    reopened(old, retrain, inline=False)
    assert {row["lr"] for row in read_metrics(files.directory) if row["attempt"] == 3} == {0.005}


def test_a_later_version_goes_on_with_the_meanings_that_keys_had(old, monkeypatch):
    def over_informative_groups(tables):
        algorithm = {"loss_normalization": "token", **tables.get("algorithm", {})}
        name = f"informative_{algorithm['loss_normalization']}"
        return {**tables, "algorithm": {**algorithm, "loss_normalization": name}}

    files = only_campaign(old)
    began_with = known_origin(files)[0].version
    for module in (keys, build, provenance):
        monkeypatch.setattr(module, "CURRENT", began_with + 1)
    monkeypatch.setitem(keys.UPGRADES, began_with, over_informative_groups)
    text = files.campaign_toml.read_text()
    files.campaign_toml.write_text(text.replace("[campaign]", '[campaign]\nlauncher = "inline"'))
    notes = Notes()
    campaign = reopen(files.directory, notes)
    assert {run.config.algorithm.loss_normalization for run in campaign.plan.runs} == {"informative_token"}
    assert campaign.execute().exit_code == 0
    assert "4 finished runs skipped" in notes.notices
    run = tomllib.loads(files.run("broken_s0").run_toml.read_text())
    assert run["algorithm"]["loss_normalization"] == "informative_token"
    assert (run["run"]["version"], is_as_written(run)) == (began_with + 1, True)
