"""Evaluations before the first step: a record and no row, made once by runs of a seed that start alike."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.base.locks import hold
from retrain.campaign.run import start
from retrain.config.digest import start_digest
from retrain.config.load import load_config, parse
from retrain.plan.build import plan_runs
from retrain.plan.estimate.history import learn
from retrain.plan.estimate.money import cost_forecast
from retrain.plan.estimate.wall_time import learned_for
from retrain.records.layout import CampaignFiles, RunFiles, files_of_runs
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_start
from retrain.records.samples import read_outcomes
from retrain.records.spending import read_spending
from retrain.results.status import survey
from retrain.trainer import worker
from tests.clocks import without_times
from tests.semaphore_processes import wait_until
from tests.stopping import StopAtLook
from tests.trainer.test_progress import phase_in
from tests.trainer.test_trainer import SMALL, make_run, train, with_

HARD = {"name": "hard", "task": "copy", "reward": "partial", "prompts": 4, "samples": 2, "temperature": 1.0}
EVALUATED = {**SMALL, "eval": [HARD]}
OFF = {**EVALUATED, **with_("training", eval_at_start=False)}
INLINE = ["campaign.launcher=inline", "campaign.parallel=false"]
PRICED = """
[[eval]]
name = "hard"
reward = "partial"
prompts = 3

[budget.prices.numpy]
sample = 2
"""


def campaign_of(file: Path, more: str = PRICED) -> dict[str, RunFiles]:
    """The runs of a finished campaign of this file, by id."""
    file.write_text(file.read_text() + more)
    return files_of_runs(CampaignFiles(start(file, INLINE).execute().directory))


def rows(files: RunFiles) -> list[dict]:
    return without_times(read_metrics(files.directory))


def test_a_run_records_what_its_evaluations_found_before_training_and_has_no_row_of_it(
    tmp_path: Path,
) -> None:
    files = train(tmp_path / "r", EVALUATED)
    found = read_start(files)
    assert {"eval_reward", "eval_hard_reward", "eval_hard_reward_se"} <= found.metrics.keys()
    assert found.made_by.keys() == {"", "hard"}
    assert [row["step"] for row in rows(files)] == [*range(1, 7)]
    assert len(read_outcomes(files.evals / "hard.jsonl")[0]) == 4


def test_a_run_takes_the_same_steps_with_and_without(tmp_path: Path) -> None:
    with_start, without = train(tmp_path / "a", EVALUATED), train(tmp_path / "b", OFF)
    assert rows(with_start) == rows(without)
    assert not without.start.exists()


@pytest.mark.parametrize("looks", range(1, 12))
def test_a_run_stopped_at_any_moment_goes_on_as_one_that_was_not(tmp_path: Path, looks: int) -> None:
    whole, broken = train(tmp_path / "whole", EVALUATED), make_run(tmp_path / "broken", EVALUATED)
    assert worker.run(broken.directory, StopAtLook(looks)) == 130
    assert worker.run(broken.directory, threading.Event()) == 0
    assert rows(broken) == rows(whole)
    assert read_outcomes(broken.evals / "hard.jsonl") == read_outcomes(whole.evals / "hard.jsonl")
    values = [
        {key: value for key, value in read_start(files).metrics.items() if not key.endswith("time_s")}
        for files in (broken, whole)
    ]
    assert values[0] == values[1]


def test_the_first_run_of_a_seed_makes_it_and_pays_and_others_take_its_record(campaign_file: Path) -> None:
    runs = campaign_of(campaign_file)
    starts = {run_id: read_start(files) for run_id, files in runs.items()}
    makers = Counter(maker for found in starts.values() for maker in found.made_by.values())
    assert sorted(makers.values()) == [4, 4]  # two evaluations of two conditions, for each of two seeds
    for run_id, files in runs.items():
        maker = starts[run_id].made_by[""]
        found, made = (
            [starts[name].value(f"eval_{metric}") for metric in ("reward", "correct_rate", "hard_reward")]
            for name in (run_id, maker)
        )
        assert found == made
        assert None not in found
        outcomes = files.evals / "hard.jsonl"
        assert read_outcomes(outcomes)[0] == read_outcomes(runs[maker].evals / "hard.jsonl")[0]
        first = json.loads(outcomes.read_text().splitlines()[0])
        assert first.get("run", run_id) == maker
        counted = sum(row["sampled_tokens"] for row in rows(files))
        last = sum(value for key, value in last_of(files).items() if key.endswith("billed_sample"))
        own = starts[run_id].metrics
        first_ones = [value for key, value in own.items() if key.endswith("billed_sample")]
        assert bool(first_ones) == (maker == run_id)
        assert read_spending(files).tokens.sample == counted + last + sum(first_ones)


def last_of(files: RunFiles) -> dict:
    return json.loads(files.done.read_text())["result"]


def test_a_run_waits_while_another_makes_it_and_makes_it_itself_if_that_is_killed(tmp_path: Path) -> None:
    files = make_run(tmp_path / "r", EVALUATED)
    config = plan_runs(parse(EVALUATED, "c")).runs[0].config
    folder = CampaignFiles(files.directory).starts
    folder.mkdir()
    maker = hold(folder / f"{start_digest(config, '')}.lock")
    assert maker is not None
    run = threading.Thread(target=worker.run, args=(files.directory, threading.Event()))
    run.start()
    try:
        wait_until(lambda: phase_in(files) == "wait for another run to evaluate")
    finally:
        maker.release()  # as the kernel does at its death
        run.join()
    assert read_start(files).made_by[""] == config.run.run_id
    assert len(rows(files)) == 6


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    files, stop = make_run(tmp_path / "r", SMALL), threading.Event()
    folder = CampaignFiles(files.directory).starts
    folder.mkdir()
    config = plan_runs(parse(SMALL, "c")).runs[0].config
    with hold(folder / f"{start_digest(config, '')}.lock"):
        codes: list[int] = []
        run = threading.Thread(target=lambda: codes.append(worker.run(files.directory, stop)))
        run.start()
        try:
            wait_until(lambda: phase_in(files) == "wait for another run to evaluate")
        finally:
            stop.set()
            run.join()
    assert codes == [130]


def test_a_damaged_record_of_another_run_is_made_anew(tmp_path: Path) -> None:
    whole, files = train(tmp_path / "whole", SMALL), make_run(tmp_path / "r", SMALL)
    folder = CampaignFiles(files.directory).starts
    folder.mkdir()
    config = plan_runs(parse(SMALL, "c")).runs[0].config
    (folder / f"{start_digest(config, '')}.json").write_text('{"run": 7')
    assert worker.run(files.directory, threading.Event()) == 0
    assert read_start(files).metrics["eval_reward"] == read_start(whole).metrics["eval_reward"]


ALIKE = [
    {"algorithm": {"advantage_mode": "grpo"}},
    with_("training", lr=1.0),
    with_("data", curriculum="pool"),
]
UNLIKE = [
    with_("training", seed=6),
    with_("training", max_tokens=5),
    with_("data", task="copy"),
    with_("backend", options={"hidden": 8}),
    with_("data", seed=3),
]


def digests(**changed: object) -> list[str]:
    config = plan_runs(parse({**EVALUATED, **changed}, "c", try_plugins=False)).runs[0].config
    return [start_digest(config, ""), start_digest(config, "hard")]


@pytest.mark.parametrize("changed", ALIKE)
def test_runs_that_start_alike_are_known(changed: dict) -> None:
    assert digests(**changed) == digests()


@pytest.mark.parametrize("changed", UNLIKE)
def test_runs_that_start_otherwise_are_known(changed: dict) -> None:
    assert not set(digests(**changed)) & set(digests())


def test_an_evaluation_with_a_reward_of_its_own_is_alike_whatever_is_trained_on() -> None:
    own, hard = digests(reward={"reward": "partial"})
    assert (own == digests()[0], hard == digests()[1]) == (False, True)


def test_a_warm_up_is_part_of_how_a_run_starts() -> None:
    warmed = {"warmup": {"steps": 2, "path": __file__}}
    assert digests(**warmed) != digests()
    assert digests(**warmed, **with_("training", lr=1.0)) != digests(**warmed)


def test_a_plan_counts_it_once_for_each_seed_and_start(campaign_file: Path) -> None:
    campaign_file.write_text(campaign_file.read_text() + PRICED)
    plan = plan_runs(load_config(campaign_file), "c")
    first, second = plan.conditions
    assert plan.evaluations_at_start == {first: {"": 2, "hard": 2}, second: {}}
    apart = campaign_file.read_text().replace(
        "[[campaign.conditions]]", "[[campaign.conditions]]\ntraining = { max_tokens = 5 }", 1
    )
    campaign_file.write_text(apart)
    plan = plan_runs(load_config(campaign_file), "c")
    assert plan.evaluations_at_start == {name: {"": 2, "hard": 2} for name in (first, second)}


def test_status_shows_what_a_run_began_with(campaign_file: Path, retrain: Callable) -> None:
    decided = '[decision]\nmetric = "eval_hard_reward"\nmax_seeds = 3\n'
    runs = campaign_of(campaign_file, PRICED + decided)
    directory = next(iter(runs.values())).directory.parent.parent
    [status] = survey(directory)
    for run in status.runs:
        assert run.eval_reward_start == read_start(runs[run.run_id]).value("eval_reward")
    for condition in status.conditions:
        begun = [read_start(files) for name, files in runs.items() if name.startswith(condition.condition)]
        values = [start.value("eval_hard_reward") for start in begun]
        assert condition.start == pytest.approx(sum(values) / len(values))
    shown = retrain("status", directory).stdout
    assert f"eval_hard_reward before training {status.conditions[0].start:.3g}" in shown


def test_explain_tells_how_many_there_are(campaign_file: Path, retrain: Callable) -> None:
    shown = retrain("explain", campaign_file).stdout
    assert "before training         2 evaluations, one for all runs of a seed that start alike" in shown
    off = retrain("explain", campaign_file, "--set", "training.eval_at_start=false").stdout
    assert "one for all runs" not in off


def test_a_forecast_from_runs_that_made_them_counts_them_once(campaign_file: Path) -> None:
    runs = campaign_of(campaign_file)
    directory = next(iter(runs.values())).directory.parent.parent
    plan = plan_runs(load_config(campaign_file), "c")
    learned = learned_for(plan, learn(directory.parent), cores=8)
    forecast = cost_forecast(plan, learned)
    spent = sum(read_spending(files).usd for files in runs.values())
    assert forecast.p50_usd == pytest.approx(spent)
