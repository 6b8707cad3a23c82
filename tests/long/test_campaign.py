"""Campaigns of real worker processes: all runs end, what fails says why, and a rest can be resumed."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.base.errors import ConfigError, LaunchError
from retrain.base.locks import hold
from retrain.campaign import Observer
from retrain.campaign.endings import Ending
from retrain.campaign.run import CampaignOutcome, reopen, run_campaign
from retrain.plan.matrix import RunPlan
from retrain.records.layout import RunFiles, create_directory
from retrain.records.manifest import read_manifest
from retrain.records.metrics import read_metrics
from retrain.records.run_state import RunState, read_attempts
from tests.conftest import ONE_RUN, TINY
from tests.plugins import broken

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _plugins_are_found_by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class Notes(Observer):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str, str]] = []
        self.tails: list[str] = []
        self.retries: list[str] = []
        self.begun_started: list[str] = []

    def started(self, run: RunPlan) -> None:
        self.begun_started.append(run.run_id)

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        self.ends.append((run.run_id, ending.state.value, ending.message))
        self.tails += tail

    def retrying(self, run: RunPlan, ending: Ending, delay_s: float) -> None:
        self.retries.append(ending.message)


def runs_of(outcome: CampaignOutcome) -> list[Path]:
    return sorted((outcome.directory / "runs").iterdir())


ONE_SEED, INLINE = ["campaign.seeds=[0]"], "campaign.launcher=inline"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> CampaignOutcome:
    """A campaign of 2 conditions x 2 seeds that has ended; tests only read it."""
    directory = tmp_path_factory.mktemp("finished")
    (directory / "tiny.toml").write_text(TINY)
    with contextlib.chdir(directory):
        outcome = run_campaign(Path("tiny.toml"))
    return replace(outcome, directory=directory / outcome.directory)


def test_every_run_of_the_matrix_is_done_and_recorded(finished: CampaignOutcome) -> None:
    outcome = finished
    assert outcome.exit_code == 0
    assert [p.name for p in runs_of(outcome)] == ["grpo_s0", "grpo_s1", "maxrl_s0", "maxrl_s1"]
    assert all([r["step"] for r in read_metrics(p)] == [1, 2, 3, 4] for p in runs_of(outcome))
    manifest = read_manifest(outcome.directory / "manifest.json")
    assert manifest is not None
    assert {run.state for run in manifest.runs} == {"done"}
    assert manifest.ended_at
    assert manifest.workers == 2
    as_json = json.loads((outcome.directory / "manifest.json").read_text())
    assert as_json["schema_version"] == 2
    assert as_json["package_version"]


def test_all_files_are_private(finished: CampaignOutcome) -> None:
    paths = [finished.directory, *finished.directory.rglob("*")]
    assert {oct(p.stat().st_mode & 0o077) for p in paths if not p.is_symlink()} == {"0o0"}


def test_what_a_condition_sets_is_what_its_run_sees(campaign_file: Path) -> None:
    text = campaign_file.read_text() + "[campaign.conditions.algorithm.advantage_params]\neps = 0.5\n"
    campaign_file.write_text(text + "[campaign.conditions.training]\nlr = 0.125\nbatch_size = 3\n")
    outcome = run_campaign(campaign_file, [*ONE_SEED, INLINE])
    run = outcome.directory / "runs" / "maxrl_s0"
    assert "eps = 0.5" in (run / "run.toml").read_text()
    assert {(row["lr"], row["batch_size"]) for row in read_metrics(run)} == {(0.125, 3)}


def test_a_run_can_be_repeated_from_its_run_toml_alone(finished: CampaignOutcome, here: Path) -> None:
    first = finished.directory / "runs" / "grpo_s1"
    copy = here / "copy.toml"
    copy.write_bytes((first / "run.toml").read_bytes())
    again = run_campaign(copy).directory
    keys = ("step", "loss", "mean_reward", "grad_norm", "seed", "condition")
    assert [[r[k] for k in keys] for r in read_metrics(again)] == [
        [r[k] for k in keys] for r in read_metrics(first)
    ]


def test_a_failing_run_is_shown_with_its_log_and_the_rest_goes_on(campaign_file: Path) -> None:
    campaign_file.write_text(
        campaign_file.read_text() + '[campaign.conditions.reward]\nreward = "tests.plugins.broken"\n'
    )
    notes = Notes()
    outcome = run_campaign(campaign_file, ONE_SEED, observer=notes)
    assert outcome.exit_code == 4
    assert sorted((r, s) for r, s, _ in notes.ends) == [("grpo_s0", "done"), ("maxrl_s0", "failed")]
    (said,) = [message for _, state, message in notes.ends if state == "failed"]
    line = broken.__code__.co_firstlineno + 1
    assert f"plugins/__init__.py:{line}: RuntimeError: this reward is broken" in said
    assert notes.tails == []  # the message says all
    assert notes.retries == []


def test_on_failure_stop_launches_nothing_more(campaign_file: Path) -> None:
    text = campaign_file.read_text().replace("parallel = true", 'parallel = false\non_failure = "stop"')
    campaign_file.write_text(text + '[reward]\nreward = "tests.plugins.broken"\n')
    notes = Notes()
    outcome = run_campaign(campaign_file, observer=notes)
    assert notes.begun_started == ["grpo_s0"]
    assert outcome.states["maxrl_s1"] is RunState.PENDING
    assert outcome.exit_code == 4


def test_a_worker_killed_by_the_kernel_is_tried_again(campaign_file: Path, here: Path) -> None:
    text = campaign_file.read_text() + '[reward]\nreward = "tests.plugins.killed_once"\n'
    campaign_file.write_text(text + f'[reward.params]\nflag = "{here / "killed"}"\n')
    notes = Notes()
    outcome = run_campaign(campaign_file, ONE_RUN, observer=notes)
    assert outcome.exit_code == 0
    assert len(notes.retries) == 1
    assert "SIGKILL" in notes.retries[0]
    (run,) = runs_of(outcome)
    assert len(read_attempts(RunFiles(run).attempts)) == 2


def test_resume_skips_what_is_done_and_leaves_failed_runs_alone(campaign_file: Path) -> None:
    campaign_file.write_text(
        campaign_file.read_text() + '[campaign.conditions.reward]\nreward = "tests.plugins.broken"\n'
    )
    directory = run_campaign(campaign_file, [*ONE_SEED, INLINE]).directory
    notes = Notes()
    assert reopen(directory, notes).execute().exit_code == 4
    assert notes.begun_started == []
    assert reopen(directory, notes).execute(retry_failed=True).exit_code == 4
    assert notes.begun_started == ["maxrl_s0"]


def test_a_second_orchestrator_is_told_who_holds_the_campaign(finished: CampaignOutcome) -> None:
    lock = hold(finished.directory / "campaign.lock")
    assert lock is not None
    with lock, pytest.raises(LaunchError, match=f"process {os.getpid()}"):
        reopen(finished.directory).execute()


def test_a_bad_file_creates_nothing(campaign_file: Path, here: Path) -> None:
    campaign_file.write_text("[training]\nlr = -1")
    with pytest.raises(ConfigError):
        run_campaign(campaign_file)
    assert [p.name for p in here.iterdir()] == ["tiny.toml"]


def test_ids_of_campaigns_started_in_the_same_instant_differ(tmp_path: Path) -> None:
    found: list[Path] = []
    gate = threading.Barrier(8)

    def make() -> None:
        gate.wait()
        found.extend(create_directory(tmp_path, "c") for _ in range(20))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 160


def test_the_inline_launcher_gives_the_same_rows_as_processes(
    finished: CampaignOutcome, campaign_file: Path
) -> None:
    inline = run_campaign(campaign_file, [INLINE])
    for one, other in zip(runs_of(finished), runs_of(inline), strict=True):
        assert [r["loss"] for r in read_metrics(one)] == [r["loss"] for r in read_metrics(other)]
