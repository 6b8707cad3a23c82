"""Searches whose points Optuna proposes: what it is told, what it proposes, and that kills change nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import optuna
import pytest

from retrain.base.errors import EXIT_DONE, ConfigError
from retrain.campaign import Observer
from retrain.campaign.run import reopen, start
from retrain.config.load import load_config
from retrain.config.schema import SearchSection
from retrain.plan.build import plan_runs
from retrain.plan.matrix import Plan
from retrain.plan.proposals import DIFFERS, SAMPLERS, propose, to_come
from retrain.records.layout import CampaignFiles
from retrain.records.lines import append_line
from retrain.records.manifest import read_manifest
from retrain.records.rungs import Proposed, all_of, read_proposals
from retrain.results.report.contents import contents
from retrain.results.report.gather import gather
from tests.explained import explained
from tests.long.test_search import SEARCH, Crash, Crashing, have_begun
from tests.stopping import killed_at

FILE = """
[training]
max_steps = 30
lr = 1e-3
[campaign]
seeds = [0, 1]
[campaign.sweep]
training.lr = { log_uniform = [1e-4, 1.0] }
training.entropy_bonus = { uniform = [0.0, 0.1] }
[campaign.search]
rungs = [10]
sampler = "optuna:tpe"
trials = 12
trials_per_round = 3
"""
CAMPAIGN = (
    SEARCH.partition("[campaign.sweep]")[0]
    + """
[campaign.sweep]
reward.params.bonus = { uniform = [0.0, 0.5] }
training.temperature = [0.9, 1.0]

[campaign.search]
rungs = [2]
keep = 0.4
sampler = "optuna:tpe"
sampler_options = { n_startup_trials = 2 }
trials = 5
trials_per_round = 2
"""
)


def planned(tmp_path: Path, *overrides: str, rounds: tuple[Proposed, ...] = ()) -> Plan:
    file, proposed = tmp_path / "c.toml", all_of(rounds)
    file.write_text(FILE)
    given = [f"campaign.{one}" for one in overrides]
    return plan_runs(load_config(file, given, proposed=proposed), "c.toml", proposed=len(proposed))


def table_of(plan: Plan) -> SearchSection:
    assert plan.campaign.search is not None
    return plan.campaign.search


def searched(tmp_path: Path, *overrides: str) -> tuple[Proposed, ...]:
    """Return all rounds of a search whose conditions are the worse the further they are from lr = 0.1."""
    rounds: tuple[Proposed, ...] = ()
    told: dict[str, float | None] = {}
    while to_come(table_of(plan := planned(tmp_path, *overrides, rounds=rounds)), rounds):
        rounds += (propose(plan, table_of(plan), rounds, told, pytest.fail),)
        told = values(planned(tmp_path, *overrides, rounds=rounds))
    return rounds


def values(plan: Plan) -> dict[str, float | None]:
    lr = {name: run.config.training.lr for name, run in plan.first_runs.items()}
    return {name: worth(value) for name, value in lr.items()}


def worth(lr: float) -> float:
    return -abs(math.log10(lr) + 1)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_proposes_points_of_the_sweep_and_none_twice(sampler: str, tmp_path: Path) -> None:
    rounds = searched(tmp_path, f"search.sampler={sampler}")
    assert [len(one.proposals) for one in rounds] == [3, 3, 3, 3]
    points = [one.point for one in all_of(rounds)]
    assert len({tuple(point.values()) for point in points}) == 12
    assert all(1e-4 <= one["training.lr"] <= 1.0 for one in points)
    assert all(0.0 <= one["training.entropy_bonus"] <= 0.1 for one in points)
    assert searched(tmp_path, f"search.sampler={sampler}") == rounds  # seeded
    if sampler != "optuna:qmc":  # Sobol's sequence, which no seed changes
        assert searched(tmp_path, f"search.sampler={sampler}", "sweep.seed=1") != rounds


def test_proposals_are_those_of_one_study_that_begins_with_the_file_itself(tmp_path: Path) -> None:
    made = optuna.distributions
    space = {
        "training.lr": made.FloatDistribution(1e-4, 1.0, log=True),
        "training.entropy_bonus": made.FloatDistribution(0.0, 0.1),
    }
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0), direction="maximize")
    study.enqueue_trial({"training.lr": 1e-3, "training.entropy_bonus": 0.0})
    waiting = [(study.ask(space), 1e-3)]
    for one in searched(tmp_path, "search.trials=18"):
        for trial, lr in waiting:
            study.tell(trial, worth(lr))
        trials = [study.ask(space) for _ in one.proposals]
        waiting = list(
            zip(trials, (proposal.point["training.lr"] for proposal in one.proposals), strict=True)
        )
        for trial, proposal in zip(trials, one.proposals, strict=True):
            assert proposal.point == pytest.approx(trial.params, rel=0.02, abs=4e-4)  # as names tell it


def test_of_times_the_lower_are_better(tmp_path: Path) -> None:
    more, less = (searched(tmp_path, f"search.metric={one}") for one in ("mean_reward", "step_time_s"))
    assert more[0] == less[0]
    assert more[-1] != less[-1]


def test_conditions_and_lists_are_chosen_among(tmp_path: Path) -> None:
    sweep = "sweep={ training = { lr = [0.01, 0.02, 0.03], batch_size = { uniform = [2, 4] } } }"
    conditions = 'conditions=[{ advantage_mode = "grpo" }, { advantage_mode = "maxrl" }]'
    found = all_of(searched(tmp_path, sweep, conditions))
    assert {one.number for one in found} == {1, 2}
    assert {type(one.point["training.batch_size"]) for one in found} == {int}
    assert len(found) == 12


def test_a_sampler_without_further_points_ends_its_proposals(tmp_path: Path) -> None:
    sweep = "sweep={ training = { batch_size = { uniform = [2, 5] } } }"
    rounds = searched(tmp_path, sweep)
    assert len(rounds[-1].proposals) == 0
    assert len(all_of(rounds)) == 4


def test_a_value_that_is_missing_is_told_as_a_failure(tmp_path: Path) -> None:
    first = searched(tmp_path, "search.trials=3")
    plan = planned(tmp_path, rounds=first)
    without = {name: None if name == plan.conditions[-1] else value for name, value in values(plan).items()}
    second = propose(plan, table_of(plan), first, without, pytest.fail)
    assert second.told[plan.conditions[-1]] is None
    assert len(second.proposals) == 3


def test_what_was_proposed_stands_if_optuna_proposes_otherwise_now(tmp_path: Path) -> None:
    rounds, notices = searched(tmp_path, "search.trials=6"), list[str]()
    moved = replace(rounds[0].proposals[0], point={"training.lr": 0.5, "training.entropy_bonus": 0.05})
    changed = (replace(rounds[0], proposals=(moved, *rounds[0].proposals[1:])), rounds[1])
    plan = planned(tmp_path, rounds=changed)
    found = propose(plan, table_of(plan), changed, values(plan), notices.append)
    assert notices == [DIFFERS]
    assert moved not in found.proposals
    assert len(found.proposals) == 3


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("{ n_startup = 4 }", "_options].n_startup: optuna:tpe has no such option; did you mean 'n_startup_"),
        ("{ seed = 4 }", "_options].seed: optuna:tpe has no such option; the seed is campaign.sweep.seed"),
        (
            '{ n_startup_trials = "4" }',
            "].sampler_options: optuna:tpe refuses them: '<' not supported",
        ),
    ],
)
def test_wrong_options_are_refused(override: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, f"search.sampler_options={override}")
    (found,) = caught.value.problems
    assert found.startswith("c.toml [campaign.search")
    assert problem in found


def test_explain_suggests_a_pilot_of_a_search_without_rungs(tmp_path: Path) -> None:
    found = explained(planned(tmp_path, "search.rungs=[]"), None)
    assert found.pilot_command.startswith("retrain c.toml --set campaign.max_steps=20 && ")


def test_explain_counts_what_will_be_proposed(tmp_path: Path) -> None:
    found = explained(planned(tmp_path), None)
    assert found.search == (
        "optuna:tpe proposes 12 conditions, 3 at a time",
        "13 conditions x 2 seeds to step 10",
        "6 conditions x 2 seeds to their ends",
        "winner and maxrl: 3 to 12 fresh seeds, which decide",
    )
    assert found.total_runs == 13 * 2 + 2 * 12
    assert found.total_campaign_steps == 2 * 7 * 10 + 2 * 6 * 30 + 2 * 12 * 30


def found_in(directory: Path) -> tuple[Any, ...]:
    """Return what a search proposed and found, and which runs it began."""
    files = CampaignFiles(directory)
    manifest = read_manifest(files.manifest)
    assert manifest is not None
    begun = {run.run_id for run in manifest.runs if files.run(run.run_id).attempts.exists()}
    return read_proposals(files.proposals), manifest.searched, manifest.decision, begun


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a search that nothing ended, to be read."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "search.toml").write_text(CAMPAIGN)
    outcome = start(directory / "search.toml", [f"logging.log_dir='{directory / 'logs'}'"]).execute()
    assert outcome.exit_code == EXIT_DONE
    return outcome.directory


def test_kills_at_any_time_change_neither_the_proposals_nor_the_winner(undisturbed: Path, here: Path) -> None:
    path = here / "search.toml"
    path.write_text(CAMPAIGN)
    expected = found_in(undisturbed)
    rounds, found = expected[:2]
    assert [len(one.proposals) for one in rounds] == [2, 2, 1]
    assert [(one.step, len(one.scores), len(one.kept)) for one in found.rungs] == [(2, 6, 2), (6, 2, 1)]
    assert found.winner not in ("", "maxrl")
    assert set(rounds[1].told) == {"maxrl", *list(found.rungs[0].scores)[1:3]}
    shown = contents(gather(undisturbed))
    drawn = shown.sections["sweep"][0].spec["layer"][0]["data"]["values"]
    assert {row["c"] for row in drawn} == set(found.rungs[0].scores) - {"maxrl"}

    stored = start(path)  # and killed between its proposals and their runs
    files = CampaignFiles(stored.directory)
    append_line(files.proposals, asdict(rounds[0]))
    assert reopen(stored.directory).execute().exit_code == EXIT_DONE
    assert found_in(stored.directory) == expected

    campaign, crashes = start(path, observer=Crashing(1)), 0
    for after in (2, 4, 1, 1, 3, 5, 100):
        try:
            campaign.execute()
        except Crash:
            crashes += 1
        CampaignFiles(campaign.directory).manifest.unlink(missing_ok=crashes % 2 == 0)
        campaign = reopen(campaign.directory, Crashing(after))
    assert crashes >= 6
    assert campaign.execute().exit_code == EXIT_DONE
    assert found_in(campaign.directory) == expected


def test_a_search_tells_once_that_it_cannot_find_a_difference(here: Path) -> None:
    class Listening(Observer):
        def notice(self, text: str) -> None:
            told.append(text)

    told: list[str] = []
    path = here / "search.toml"
    path.write_text(CAMPAIGN)
    settings = ["decision.max_seeds=3", "campaign.search.trials=2", "campaign.search.trials_per_round=1"]
    assert start(path, settings, observer=Listening()).execute().exit_code == EXIT_DONE
    assert sum("max_seeds = 3 finds no difference" in one for one in told) == 1


@pytest.mark.timeout(600)  # processes, on machines that do other things as well
def test_all_processes_may_be_killed_while_conditions_are_proposed(
    undisturbed: Path, here: Path, retrain: Callable[..., CompletedProcess[str]]
) -> None:
    path = here / "search.toml"
    path.write_text(CAMPAIGN)
    expected = found_in(undisturbed)
    directory = killed_at((3, 9), have_begun, path, here / "killed")
    done = retrain("resume", directory)
    assert done.returncode == EXIT_DONE
    assert "search: optuna:tpe proposed 5 conditions" in done.stdout
    assert found_in(directory) == expected


def test_points_that_cannot_be_run_are_told_where_their_ends_are_written(here: Path) -> None:
    path = here / "search.toml"
    path.write_text(CAMPAIGN)
    with pytest.raises(ConfigError) as caught:
        start(path, ["campaign.sweep.training.temperature=[1.0, -1.0]"])
    (problem,) = caught.value.problems
    assert problem == 'search.toml [campaign.sweep]."training.temperature": got -1.0; needs at least 0.01'
    assert not (here / "logs").exists()
