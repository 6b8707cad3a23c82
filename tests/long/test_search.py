"""Campaigns that drop the worse conditions at rungs and decide on fresh seeds, also if they are killed."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from retrain.base.errors import EXIT_DONE, EXIT_RUN_FAILED, ConfigError, RecordsError, records_error
from retrain.campaign import Observer, strategies
from retrain.campaign.endings import Ending
from retrain.campaign.run import reopen, start
from retrain.plan.matrix import RunPlan
from retrain.records.decision import Decision
from retrain.records.layout import CampaignFiles, RunFiles, find_campaigns
from retrain.records.lines import append_line
from retrain.records.manifest import Manifest, read_manifest
from retrain.records.metrics import read_metrics
from retrain.records.run_state import RunState, read_attempts, read_done
from retrain.records.rungs import Searched
from retrain.results.report.contents import contents
from retrain.results.report.facts import failures
from retrain.results.report.gather import gather
from retrain.results.report.sides import choose
from retrain.results.status import survey
from retrain.results.status.watch import Watcher
from retrain.trainer import opening
from retrain.trainer.part import Part
from tests.long.test_decision import DECISION
from tests.stopping import IN_TWO_WORKERS, INLINE, finish_inline, killed_at

TABLE = """
[decision]
metric = "mean_reward"
max_seeds = 6
"""
SEARCH = (
    DECISION.partition("[decision]")[0]
    + TABLE
    + """
[campaign]
seeds = [5, 7]
max_steps = 6
launcher = "inline"

[campaign.sweep]
reward.params.bonus = [0.0, 0.1, 0.2, 0.3, 0.5]

[campaign.search]
rungs = [2, 4]
keep = 0.7
"""
)
WINNER, REFERENCE = "maxrl bonus=0.5", "maxrl bonus=0.0"


def manifest_of(directory: Path) -> Manifest:
    found = read_manifest(CampaignFiles(directory).manifest)
    assert found is not None
    return found


def learned(files: RunFiles) -> list[dict[str, Any]]:
    """Return what a run learned, without its times and attempts."""
    kept = ("step", "loss", "mean_reward", "grad_norm", "entropy")
    return [{key: row[key] for key in kept} for row in read_metrics(files.directory)]


class Looking(Observer):
    """Looks as a user would at the runs that go on at the first rung, before one of them has started."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.shown: list[
            set[tuple[str, str]]
        ] = []  # states and phases, by status, its live view and the report

    def asked(self, runs: Sequence[RunPlan]) -> None:
        if not self.shown:
            (directory,) = find_campaigns(self._logs)
            (watched,) = Watcher(directory).refresh().campaigns
            views = (
                survey(directory)[0].runs,
                [run.row for run in watched.runs.values()],
                gather(directory).runs,
            )
            asked = {run.run_id for run in runs}
            self.shown = [{(one.state, one.phase) for one in view if one.run_id in asked} for view in views]


def test_a_search_drops_the_worse_and_decides_on_fresh_seeds(here: Path) -> None:
    path = here / "search.toml"
    path.write_text(SEARCH)
    looking = Looking(here / "logs")
    outcome = start(path, observer=looking).execute()
    assert outcome.exit_code == EXIT_DONE
    assert looking.shown == [{("pending", "after rung 2")}] * 3
    assert set(outcome.states.values()) == {RunState.DONE}
    manifest, files = manifest_of(outcome.directory), CampaignFiles(outcome.directory)
    searched, decision = manifest.searched, manifest.decision
    assert searched is not None
    assert decision is not None
    assert (searched.winner, searched.reference, searched.seeds) == (WINNER, REFERENCE, (5, 7))
    rungs = [(one.step, len(one.scores), len(one.kept)) for one in searched.rungs]
    assert rungs == [
        (2, 5, 3),
        (4, 3, 2),
        (6, 2, 1),
    ]

    done = {run.run_id: read_done(files.run(run.run_id).done) for run in manifest.runs}
    steps = {run_id: one.result["steps"] for run_id, one in done.items() if one}
    assert [steps[f"maxrl-bonus-{bonus}_s5"] for bonus in (0.0, 0.1, 0.2, 0.3, 0.5)] == [2, 2, 4, 6, 6]
    dropped = done["maxrl-bonus-0.1_s5"]
    assert dropped is not None
    assert dropped.result["dropped"].startswith("dropped at step 2: mean_reward ")
    assert read_attempts(files.run("maxrl-bonus-0.1_s5").attempts)[-1].message == dropped.result["dropped"]
    assert list(files.run("maxrl-bonus-0.1_s5").checkpoints.iterdir())

    assert [one.condition for one in decision.conditions] == [WINNER]
    assert decision.ended
    fresh = {run.seed for run in manifest.runs} - {5, 7}
    assert len(fresh) == decision.conditions[0].seeds
    (match,) = choose([str(outcome.directory)])
    assert {side.label: {run.seed for run in side.runs} for side in match.sides} == {
        REFERENCE: fresh,
        WINNER: fresh,
    }
    (status,) = survey(outcome.directory)
    assert (status.state, status.searched) == ("done", searched)
    shown = contents(gather(outcome.directory))
    drawn = shown.sections["sweep"][0].spec["layer"][0]["data"]["values"]
    assert {row["c"] for row in drawn} == set(searched.rungs[0].scores)
    assert {row["seed"] for row in drawn} == {"5", "7"}  # all conditions on the same
    assert not list(failures(gather(outcome.directory).runs))  # to wait at a rung is none
    with pytest.raises(ConfigError, match=r"raise decision\.max_seeds"):
        reopen(outcome.directory, more_seeds=1)

    whole = here / "whole.toml"  # runs that waited learned what they would have learned without a search
    whole.write_text(SEARCH.partition("[campaign.search]")[0].replace(TABLE, ""))
    without = CampaignFiles(start(whole).execute().directory)
    for run_id in ("maxrl-bonus-0.5_s5", "maxrl-bonus-0.3_s7"):
        assert learned(files.run(run_id)) == learned(without.run(run_id))


class OverAfterAStep(Part):
    def is_over(self, step: int) -> bool:
        return step >= 1


def test_a_run_that_is_over_before_a_rung_is_judged_there_by_its_end(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts_of = opening.parts_of

    def with_an_early_end(run: opening.OpenRun) -> Iterator[Part]:
        yield from parts_of(run)
        if run.config.reward.params["bonus"] == 0.5:
            yield OverAfterAStep()

    monkeypatch.setattr(opening, "parts_of", with_an_early_end)
    (here / "search.toml").write_text(SEARCH)
    outcome = start(here / "search.toml").execute()
    assert outcome.exit_code == EXIT_DONE
    searched = manifest_of(outcome.directory).searched
    assert searched is not None
    assert (searched.winner, len(searched.rungs)) == (WINNER, 3)


def found_of(directory: Path) -> tuple[Any, Decision | None]:
    manifest = manifest_of(directory)
    return manifest.searched, manifest.decision


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a search that nothing ended, to be read."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "search.toml").write_text(SEARCH)
    log_dir = f"logging.log_dir='{directory / 'logs'}'"
    return start(directory / "search.toml", [log_dir]).execute().directory


class Crash(BaseException):
    """The end of this process, as it were."""


class Crashing(Observer):
    """Ends the orchestrator, and what runs in its process, after so many runs have ended or waited."""

    def __init__(self, after: int) -> None:
        self._left = after

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        del run, ending, tail
        self._left -= 1
        if self._left == 0:
            raise Crash


def test_an_orchestrator_that_dies_again_and_again_comes_to_the_same_verdict(
    undisturbed: Path, here: Path
) -> None:
    path = here / "search.toml"
    path.write_text(SEARCH)
    campaign, crashes = start(path, observer=Crashing(3)), 0
    directory = campaign.directory
    for after in (5, 4, 3, 2, 1, 3, 6, 100):
        try:
            campaign.execute()
        except Crash:
            crashes += 1
        campaign = reopen(directory, Crashing(after))
    assert crashes >= 7
    assert campaign.execute().exit_code == EXIT_DONE
    assert found_of(directory) == found_of(undisturbed)


@pytest.mark.timeout(600)  # processes, on machines that do other things as well
def test_kills_of_all_processes_change_neither_the_winner_nor_the_verdict(
    undisturbed: Path, here: Path
) -> None:
    path, expected = here / "search.toml", found_of(undisturbed)
    path.write_text(SEARCH.replace(INLINE, IN_TWO_WORKERS))
    directory = killed_at((8,), have_begun, path, here / "killed")
    assert found_of(directory) != expected  # this far, there was something to kill
    assert finish_inline(directory).exit_code == EXIT_DONE
    assert found_of(directory) == expected
    results = [json.loads(path.read_text()) for path in directory.glob("runs/*/done.json")]
    assert sum("dropped" in one["result"] for one in results) == 6


def have_begun(directory: Path, attempts: int) -> bool:
    paths = directory.glob("logs/*/runs/*/attempts.jsonl")
    return sum(path.read_text().count('"begin"') for path in paths) >= attempts


class CrashAtRung(Observer):
    """Ends the orchestrator before the runs that go on at a rung have started."""

    def asked(self, runs: Sequence[RunPlan]) -> None:
        raise Crash


class Listener(Observer):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


DOWN = (
    SEARCH.replace('"tests.reward_functions.spelled"', '"tests.plugins.longest_once_there"')
    .replace("reward.params.bonus = [0.0, 0.1, 0.2, 0.3, 0.5]", 'reward.params.gate = ["", "there"]')
    .replace("keep = 0.7", "keep = 0.5")
    .replace('launcher = "inline"', 'launcher = "inline"\nretries = 0')
    .replace("[2, 4]", "[2]")
)


def test_a_rung_stays_open_while_a_run_of_it_can_be_tried_again(here: Path) -> None:
    path = here / "search.toml"
    path.write_text(DOWN)
    outcome = start(path).execute()
    directory = outcome.directory
    assert outcome.exit_code == EXIT_RUN_FAILED
    assert manifest_of(directory).searched == Searched("mean_reward", "maxrl gate=", (5, 7), stages=((2, 2),))
    assert survey(directory)[0].resume_with == f"retrain resume {directory}"
    again = reopen(directory).execute()  # as long as the server is down
    assert {run_id for run_id, state in again.states.items() if state is RunState.INFRASTRUCTURE} == {
        "maxrl-gate-there_s5",
        "maxrl-gate-there_s7",
    }
    (here / "there").touch()
    assert reopen(directory).execute().exit_code == EXIT_DONE
    searched = manifest_of(directory).searched
    assert searched is not None
    assert None not in searched.rungs[0].scores.values()


def test_runs_without_which_a_rung_was_decided_are_over(here: Path) -> None:
    path = here / "search.toml"
    path.write_text(DOWN)
    directory = start(path).execute().directory
    rung = {"step": 2, "scores": {"maxrl gate=": 1.0, "maxrl gate=there": None}, "kept": ["maxrl gate="]}
    append_line(CampaignFiles(directory).rungs, rung)
    outcome = reopen(directory).execute()
    assert set(outcome.states.values()) == {RunState.DONE}
    assert survey(directory)[0].resume_with == ""


@pytest.mark.parametrize("damaged", ["metrics.jsonl", "rung.json"])
def test_damaged_records_of_one_run_hold_up_no_search(undisturbed: Path, here: Path, damaged: str) -> None:
    path = here / "search.toml"
    path.write_text(SEARCH)
    campaign = start(path, observer=CrashAtRung())
    with pytest.raises(Crash):
        campaign.execute()
    run = campaign.files_of("maxrl-bonus-0.2_s5")
    if damaged == "rung.json":
        run.rung.write_text("{")
    else:
        run.metrics.unlink()
        run.metrics.mkdir()
    said = Listener()
    outcome = reopen(campaign.directory, said).execute()
    left = [run_id for run_id, state in outcome.states.items() if state is not RunState.DONE]
    assert left == ["maxrl-bonus-0.2_s5"] * (damaged == "metrics.jsonl")
    assert all(said.notices.count(line) == 1 for line in said.notices if "metrics.jsonl: " in line)
    assert found_of(campaign.directory)[0].winner == found_of(undisturbed)[0].winner


def test_a_search_waits_for_records_that_cannot_be_read_for_now(
    undisturbed: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = here / "search.toml"
    path.write_text(SEARCH)
    campaign = start(path, observer=CrashAtRung())
    with pytest.raises(Crash):
        campaign.execute()

    def fail(files: RunFiles, **_: object) -> NoReturn:
        broken = OSError(errno.EIO, "Input/output error")
        raise records_error(files.metrics, "read", broken) from broken

    with monkeypatch.context() as failing:
        failing.setattr(strategies, "value_over", fail)
        with pytest.raises(RecordsError, match="Input/output error"):
            reopen(campaign.directory).execute()
    assert reopen(campaign.directory).execute().exit_code == EXIT_DONE
    assert found_of(campaign.directory) == found_of(undisturbed)


def test_a_search_goes_on_from_its_files_without_a_manifest(undisturbed: Path, here: Path) -> None:
    directory = Path(shutil.copytree(undisturbed, here / "search"))
    expected = found_of(directory)
    CampaignFiles(directory).manifest.unlink()
    assert reopen(directory).execute().exit_code == EXIT_DONE
    assert found_of(directory) == expected
