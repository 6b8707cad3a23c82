"""What a campaign with `[decision]` has looked at stands, whatever is repaired or changed afterwards."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from retrain.base.errors import EXIT_DONE, EXIT_RUN_FAILED, ConfigError, LaunchError, RecordsError
from retrain.campaign import Observer
from retrain.campaign.endings import Ending
from retrain.campaign.forecast import busy_s
from retrain.campaign.run import reopen, start
from retrain.plan.matrix import RunPlan
from retrain.records.decision import ADDED, lines_of, read_looks
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.lines import append_line
from retrain.records.run_state import RunState, begin_attempt, end_attempt
from retrain.results.status import survey
from tests.long.test_decision import DECISION, decision_of, stopped_after, verdicts

TWO_CONDITIONS = DECISION.partition('[[campaign.conditions]]\nname = "alike"')[0]
WITHOUT_RETRIES = ("campaign.retries=0",)


class Notices(Observer):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def notice(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def decision_file(here: Path) -> Path:
    path = here / "decision.toml"
    path.write_text(TWO_CONDITIONS)
    return path


def with_a_lost_run(path: Path, *overrides: str) -> Path:
    """Return the directory of a campaign of which one run could not write its rows, which is mended now."""
    campaign = start(path, (*WITHOUT_RETRIES, *overrides))
    in_the_way = campaign.files_of("bonus_s8").metrics
    in_the_way.mkdir()
    assert campaign.execute().exit_code == EXIT_RUN_FAILED
    in_the_way.rmdir()
    return campaign.directory


def test_a_run_that_is_repaired_after_the_verdict_is_no_part_of_it(decision_file: Path) -> None:
    directory = with_a_lost_run(decision_file)
    before = decision_of(directory)
    assert verdicts(before) == {"bonus": ("better", 6)}
    outcome = reopen(directory).execute(retry_failed=True)
    after = decision_of(directory)
    assert (outcome.exit_code, outcome.states["bonus_s8"]) == (EXIT_DONE, RunState.DONE)
    assert (after.conditions, after.ended, after.runs) == (before.conditions, before.ended, before.runs)
    assert after.again == ("bonus_s8",)
    assert any("not part of the decision: what bonus_s8" in line for line in lines_of(after))


def test_a_decided_campaign_that_is_resumed_keeps_its_end(decision_file: Path) -> None:
    directory = start(decision_file).execute().directory
    before = survey(directory)[0]
    assert len(before.runs) < len(reopen(directory).plan.runs)  # further seeds were not needed
    reopen(directory).execute()
    assert survey(directory)[0].ended_at == before.ended_at


class Unreadable(Observer):
    """Makes a finished run's files unreadable for a while."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.done_of: Callable[[str], Path] | None = None

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        del ending, tail
        if run.run_id == self.run_id and self.done_of is not None:
            done = self.done_of(run.run_id)
            done.rename(done.with_name("kept.json"))
            done.symlink_to("/proc/self/mem")  # which begins with an input/output error


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that opens and cannot be read")
def test_a_run_that_cannot_be_read_for_now_is_no_lost_seed(decision_file: Path) -> None:
    undisturbed = decision_of(start(decision_file).execute().directory)
    observer = Unreadable("bonus_s8")
    campaign = start(decision_file, observer=observer)
    observer.done_of = lambda run_id: campaign.files_of(run_id).done
    with pytest.raises(RecordsError, match=r"done.json: cannot read \(Input/output error"):
        campaign.execute()
    done = campaign.files_of("bonus_s8").done
    done.with_name("kept.json").replace(done)
    assert reopen(campaign.directory).execute().exit_code == EXIT_DONE
    found = decision_of(campaign.directory)
    assert (found.conditions, found.runs) == (undisturbed.conditions, undisturbed.runs)


def test_a_verdict_needs_only_what_was_looked_at(decision_file: Path) -> None:
    """Not the runs, which another version might read otherwise, nor the manifest."""
    directory = start(decision_file).execute().directory
    before, runs = decision_of(directory), CampaignFiles(directory).run
    for seed in (5, 7):
        done = runs(f"bonus_s{seed}").done
        found = json.loads(done.read_text())
        rows = runs(f"bonus_s{seed}").metrics
        rows.write_text(rows.read_text().replace('"mean_reward": ', '"mean_reward": -'))
        kept = {key: value for key, value in found.items() if key != "metrics"}  # the rows' seal
        done.write_text(json.dumps(kept))
    CampaignFiles(directory).manifest.unlink()
    reopen(directory).execute()
    after = decision_of(directory)
    assert after.conditions == before.conditions
    assert after.again == ("bonus_s5", "bonus_s7")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("max_seeds = 8", "max_seeds = 9"),
        ('"mean_reward"', '"correct_rate"'),
        ("max_seeds", 'budget = "1h"\nmax_seeds'),
    ],
)
def test_a_design_that_is_changed_after_a_look_is_refused_or_told(
    decision_file: Path, before: str, after: str, retrain: Callable[..., CompletedProcess[str]]
) -> None:
    directory = stopped_after(decision_file, 8).directory
    given = CampaignFiles(directory).campaign_toml
    given.write_text(given.read_text().replace(before, after, 1))
    with pytest.raises(ConfigError, match=r"decision\.\w+: .* -> ") as refused:
        reopen(directory)
    assert "is new" not in str(refused.value)
    reopen(directory, accept_config_change=True).execute()
    reopen(directory).execute()  # accepted once, and still told
    found = decision_of(directory)
    assert len(found.changes) == 1
    told = "the design was changed after data were seen"
    assert any(told in line for line in lines_of(found))
    assert told in retrain("status", directory).stdout


def test_a_decision_that_is_taken_out_of_the_file_is_missed(decision_file: Path) -> None:
    directory = start(decision_file).execute().directory
    given = CampaignFiles(directory).campaign_toml
    given.write_text(given.read_text().replace('[decision]\nmetric = "mean_reward"\nmax_seeds = 8\n', ""))
    with pytest.raises(ConfigError, match="decision: the table is gone"):
        reopen(directory)


TABLE = '[decision]\nmetric = "mean_reward"\nmax_seeds = 8\n'


def test_a_decision_that_was_taken_out_is_told_with_its_verdicts(
    decision_file: Path, retrain: Callable[..., CompletedProcess[str]]
) -> None:
    directory = stopped_after(decision_file, 8).directory
    given = CampaignFiles(directory).campaign_toml
    given.write_text(given.read_text().replace(TABLE, "").replace("[5, 7]", "[5, 7, 8]"))
    reopen(directory, accept_config_change=True).execute()
    found = decision_of(directory)
    assert (found.ended, verdicts(found)) == ("dropped", {"bonus": ("undecided", 4)})
    told = "[decision] was taken out of campaign.toml after these verdicts"
    assert told in retrain("status", directory).stdout
    assert told in retrain("compare", directory).stdout
    assert survey(directory)[0].state == "done"
    given.write_text(TABLE + given.read_text())
    with pytest.raises(ConfigError, match="the table is there again"):
        reopen(directory)
    reopen(directory, accept_config_change=True).execute()
    again = decision_of(directory)
    assert (again.ended, again.changes[-1]) == ("decided", "decision: the table is there again")
    assert "the table is gone, after looks at 4 seeds" in again.changes[0]


def test_a_decision_that_was_taken_out_before_a_look_is_forgotten(decision_file: Path) -> None:
    directory = stopped_after(decision_file, 2).directory
    given = CampaignFiles(directory).campaign_toml
    given.write_text(given.read_text().replace(TABLE, "").replace("[5, 7]", "[5, 7, 8]"))
    reopen(directory).execute()
    (status,) = survey(directory)
    assert (status.state, status.decision) == ("done", None)


@pytest.mark.parametrize("max_seeds", [7, 9])
def test_another_number_of_seeds_may_be_chosen_before_the_first_look(
    decision_file: Path, max_seeds: int
) -> None:
    directory = stopped_after(decision_file, 2).directory
    given = CampaignFiles(directory).campaign_toml
    given.write_text(given.read_text().replace("max_seeds = 8", f"max_seeds = {max_seeds}"))
    reopen(directory).execute()
    found = decision_of(directory)
    assert (found.max_seeds, found.changes, verdicts(found)["bonus"][0]) == (max_seeds, (), "better")


def test_a_condition_is_new_also_before_the_first_look(decision_file: Path) -> None:
    directory = stopped_after(decision_file, 2).directory
    given = CampaignFiles(directory).campaign_toml
    given.write_text(DECISION)
    with pytest.raises(ConfigError, match="run alike_s5: is new"):
        reopen(directory)


def test_a_design_may_be_changed_before_the_first_look(decision_file: Path) -> None:
    directory = stopped_after(decision_file, 2).directory
    given = CampaignFiles(directory).campaign_toml
    given.write_text(given.read_text().replace('"mean_reward"', '"correct_rate"'))
    reopen(directory).execute()
    found = decision_of(directory)
    assert (found.metric, found.changes) == ("correct_rate", ())


def test_a_raised_budget_opens_no_decision_that_has_ended(decision_file: Path) -> None:
    decision_file.write_text(TWO_CONDITIONS.replace("max_seeds = 8", 'max_seeds = 8\nbudget = "1s"'))
    campaign = start(decision_file)
    attempts = campaign.files_of("plain_s5").attempts
    end_attempt(attempts, begin_attempt(attempts), RunState.INTERRUPTED)
    append_line(attempts, {"event": "end", "attempt": 1, "ended_at": "2999-01-01T00:00:00Z"})
    directory = campaign.execute().directory
    ended = decision_of(directory)
    assert (ended.ended, verdicts(ended)) == ("budget", {"bonus": ("undecided", 3)})
    given = CampaignFiles(directory).campaign_toml
    given.write_text(given.read_text().replace('"1s"', '"9999999h"'))
    with pytest.raises(ConfigError, match=r"decision\.budget: '1s' -> '9999999h'"):
        reopen(directory)
    reopen(directory, accept_config_change=True).execute()
    found = decision_of(directory)
    assert (found.ended, verdicts(found)) == ("decided", {"bonus": ("better", 6)})
    assert found.changes == ("decision.budget: '1s' -> '9999999h', after looks at 3 seeds",)


def test_a_design_stands_although_its_file_is_lost(decision_file: Path) -> None:
    directory, notices = stopped_after(decision_file, 8).directory, Notices()
    files = CampaignFiles(directory)
    files.looks.unlink()
    given = files.campaign_toml.read_text()
    files.campaign_toml.write_text(given.replace("max_seeds = 8", "max_seeds = 9"))
    with pytest.raises(ConfigError, match=r"decision\.max_seeds: 8 -> 9"):
        reopen(directory)
    reopen(directory, notices, accept_config_change=True).execute()
    assert decision_of(directory).changes == ("decision.max_seeds: 8 -> 9",)
    assert not any("decision.jsonl" in text for text in notices.texts)


def test_a_lost_file_of_looks_is_told(decision_file: Path) -> None:
    directory, notices = start(decision_file).execute().directory, Notices()
    before = decision_of(directory)
    CampaignFiles(directory).looks.unlink()
    reopen(directory, notices).execute()
    assert decision_of(directory) == before
    assert any("decision.jsonl was lost: its looks are repeated" in text for text in notices.texts)


def test_a_line_that_was_cut_off_is_looked_at_again(decision_file: Path) -> None:
    directory = start(decision_file).execute().directory
    before, looks = decision_of(directory), CampaignFiles(directory).looks
    looks.write_bytes(looks.read_bytes()[:-20])
    reopen(directory).execute()
    assert decision_of(directory) == before
    assert len(read_looks(looks).rounds) == 4


def test_an_attempt_that_was_killed_with_its_orchestrator_lasted_until_its_last_row(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.attempts.write_text(
        '{"event": "begin", "attempt": 1, "started_at": "2026-01-01T00:00:00Z"}\n'
        '{"event": "begin", "attempt": 2, "started_at": "2026-01-01T02:00:00Z"}\n'
        '{"event": "end", "attempt": 2, "ended_at": "2026-01-01T02:00:10Z", "ending": "done"}\n'
    )
    rows = [(1, 1, "00:00:30"), (2, 1, "00:01:00"), (1, 2, "02:00:05")]
    files.metrics.write_text(
        "".join(
            f'{{"step": {step}, "attempt": {attempt}, "timestamp": "2026-01-01T{at}Z"}}\n'
            for step, attempt, at in rows
        )
    )
    assert busy_s([files]) == 60 + 10


def test_a_decision_that_is_added_to_runs_was_not_planned(decision_file: Path) -> None:
    decision_file.write_text(decision_file.read_text().replace(TABLE, "").replace("[5, 7]", "[5, 7, 8]"))
    directory = start(decision_file).execute().directory
    given = CampaignFiles(directory).campaign_toml
    given.write_text(TABLE + given.read_text())
    with pytest.raises(ConfigError, match="decision: the table was added when runs had begun"):
        reopen(directory)
    reopen(directory, accept_config_change=True).execute()
    found = decision_of(directory)
    assert (found.ended, found.changes) == ("decided", (ADDED,))
    assert any("The error of 0.05 no longer holds" in line for line in lines_of(found))
    reopen(directory).execute()  # accepted once


def test_fewer_seeds_may_be_asked_for_before_a_look_also_without_a_manifest(decision_file: Path) -> None:
    directory = stopped_after(decision_file, 2).directory
    files = CampaignFiles(directory)
    files.manifest.unlink()
    files.campaign_toml.write_text(files.campaign_toml.read_text().replace("max_seeds = 8", "max_seeds = 6"))
    assert reopen(directory).execute().exit_code == EXIT_DONE
    assert decision_of(directory).max_seeds == 6


@pytest.mark.parametrize(("condition", "whose"), [("bonus", "its"), ("plain", "plain's")])
def test_a_condition_whose_runs_failed_goes_on_once_they_are_repaired(
    decision_file: Path, condition: str, whose: str, retrain: Callable[..., CompletedProcess[str]]
) -> None:
    campaign = start(decision_file, WITHOUT_RETRIES)
    in_the_way = [campaign.files_of(f"{condition}_s{seed}").metrics for seed in (5, 7, 8)]
    for path in in_the_way:
        path.mkdir()
    assert campaign.execute().exit_code == EXIT_RUN_FAILED
    lost = decision_of(campaign.directory)
    assert (lost.ended, lost.runs, lost.saved_runs) == ("failed", 6, 10)
    told = f"after 0 seeds; {whose} last 3 runs gave no value"
    assert told in retrain("status", campaign.directory).stdout
    assert reopen(campaign.directory).execute().exit_code == EXIT_RUN_FAILED  # failed runs are left alone
    assert decision_of(campaign.directory) == lost
    for path in in_the_way:
        path.rmdir()
    reopen(campaign.directory).execute(retry_failed=True)
    found = decision_of(campaign.directory)
    (one,) = found.conditions
    assert (one.verdict, one.seeds, one.reason) == ("undecided", 5, "")  # 3 of 8 seeds are lost
    assert (found.ended, found.again) == ("seeds", tuple(path.parent.name for path in in_the_way))


def test_a_change_that_was_accepted_is_told_although_the_launcher_could_not_work(
    decision_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = stopped_after(decision_file, 8).directory
    given = CampaignFiles(directory).campaign_toml
    changed = given.read_text().replace("[training]", "[training]\nentropy_bonus = 0.01", 1)
    given.write_text(changed.replace('"inline"', '"slurm"'))
    with monkeypatch.context() as without_slurm:
        without_slurm.setenv("PATH", "/nowhere")
        with pytest.raises(LaunchError):
            reopen(directory, accept_config_change=True).execute()
    given.write_text(changed)
    assert reopen(directory).execute().exit_code == EXIT_DONE
    (change,) = decision_of(directory).changes
    assert change.startswith("training.entropy_bonus: ")
