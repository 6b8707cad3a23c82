"""A budget has room for evaluations: those at a run's end, and those that were never made before."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_INFRASTRUCTURE, InterruptedRunError
from retrain.base.rollouts import Prompt
from retrain.campaign.run import reopen, start
from retrain.cli.render.status import left_undone
from retrain.config.prices import Price
from retrain.config.schema import Config, EnvironmentSection
from retrain.records.campaign_state import asked_to_stop
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_row import RunRow
from retrain.records.run_state import read_done
from retrain.records.samples import read_outcomes
from retrain.records.spending import Tokens, read_spending
from retrain.results.status import survey
from retrain.trainer import worker
from retrain.trainer.budget import Budget
from retrain.trainer.part import Due
from tests.trainer.test_budget import PRICED, PRICES, open_budget, take_step
from tests.trainer.test_trainer import make_run

EVALUATED = """
[[eval]]
name = "hard"
every = {every}
at_start = {at_start}
prompts = 20
samples = 2
temperature = 1.0

[budget.prices.numpy]
sample = 2
train = 3
"""
PRICE = Price(prefill=1, cached=1, sample=2, train=3)


@pytest.mark.parametrize(
    ("usd", "every", "at_start"),
    [(0.0001, 1, False), (0.0003, 0, False), (0.0002, 3, False), (0.0008, 0, False), (0.002, 3, True)],
)
def test_evaluations_are_made_only_where_the_budget_has_room_for_them(
    campaign_file: Path, usd: float, every: int, at_start: bool
) -> None:
    """A step costs $0.00006, the evaluations $0.00022: those of a first step, of others, of runs' ends."""
    campaign_file.write_text(
        campaign_file.read_text() + EVALUATED.format(every=every, at_start=str(at_start).lower())
    )
    options = ["campaign.launcher=inline", "campaign.parallel=false", f"training.eval_every={every}"]
    stopped = start(campaign_file, [*options, f"budget.usd={usd}"]).execute()
    whole = start(campaign_file, options).execute()
    runs = [*(whole.directory / "runs").iterdir()]
    [seen] = survey(stopped.directory)
    assert stopped.exit_code == 130
    assert seen.cost_usd is not None
    assert 0.3 * usd < seen.cost_usd <= usd + max(map(dearest_step_usd, runs))
    done = reopen(stopped.directory, budget_usd=1).execute()
    assert done.exit_code == 0
    for run in runs:
        assert evaluated(done.directory / "runs" / run.name) == evaluated(run)


def dearest_step_usd(run: Path) -> float:
    spent = read_spending(RunFiles(run))
    assert spent is not None
    return spent.largest_step_usd


def evaluated(run: Path) -> list[list[object]]:
    done = read_done(RunFiles(run).done)
    assert done is not None
    return [
        [value for key, value in row.items() if key.startswith("eval_") and not key.endswith("_time_s")]
        for row in (*read_metrics(run), done.result)
    ]


@pytest.fixture
def run(tmp_path: Path) -> RunFiles:
    """A run of steps of 12 rollouts, whose campaign may cost $10."""
    files = CampaignFiles(tmp_path / "c")
    made = make_run(files.run("a_s0").directory, {**PRICED, "budget": {"prices": PRICES, "usd": 10.0}})
    files.campaign_toml.touch()
    return made


def asks(config: Config, prompts: int, text: str = "") -> Due:
    """Return an evaluation of a completion of 4 tokens a prompt."""
    return Due("hard", [Prompt(n, text, "") for n in range(prompts)], 1, 4, config.environment, config)


def test_a_first_evaluation_is_set_aside_as_if_each_completion_cost_as_much_as_one_of_a_step(
    run: RunFiles,
) -> None:
    config = replace(worker.read_run(run), training=replace(worker.read_run(run).training, max_tokens=10**6))
    budget = open_budget(config, run)
    due = replace(asks(config, 36), max_tokens=10**6)
    assert budget.why_to_stop(0, [due]) == ""  # nothing is known before the first step
    take_step(budget, 1.2)  # $0.10 a rollout
    assert budget.why_to_stop(0, [due]) == ""
    spent = read_spending(run)
    assert spent is not None
    assert spent.set_aside_usd == pytest.approx(1.2 + 3.6)
    said = budget.why_to_stop(0, [replace(due, samples=3)], is_step=False)
    assert (
        "no room for another evaluation: $1.20 are spent, and the next evaluation costs up to $10.80" in said
    )


def test_a_dearer_evaluation_is_set_aside_from_then_on_and_grows_with_the_completions(run: RunFiles) -> None:
    config = worker.read_run(run)
    budget = open_budget(config, run)
    take_step(budget, 1.2)
    for usd in (2.0, 1.0):
        budget.evaluated(asks(config, 1), Tokens(sample=int(usd * 1e6 / 2)))
    assert budget.why_to_stop(0, [asks(config, 1)], is_step=False) == ""
    again = open_budget(config, run)  # after a kill
    take_step(again, 1.8)
    assert again.why_to_stop(0, [asks(config, 1)], is_step=False) == ""
    spent = read_spending(run)
    assert spent is not None
    assert spent.set_aside_usd == pytest.approx(2.0 * 1.5)
    assert spent.evaluations["hard"].usd == 2.0


def test_a_first_evaluation_costs_at_most_its_tokens_and_more_turns_cost_more(run: RunFiles) -> None:
    config = worker.read_run(run)  # of 4 tokens a completion
    due = asks(config, 10, text="12=")
    assert due.at_most_usd(PRICE, rollout_usd=1.0) == pytest.approx(10 * (3 * 1 + 4 * 2) / 1e6)
    longer = replace(due, max_tokens=8)
    assert longer.at_most_usd(PRICE, 4e-6) == pytest.approx(10 * (3 * 1 + 4 * 2) / 1e6)
    turns = replace(due, played=EnvironmentSection(environment="guess", max_turns=5))
    assert turns.at_most_usd(PRICE, 4e-6) == pytest.approx(10 * (3 * 1 + 5 * 4) / 1e6)
    same = replace(turns, trained=replace(config, environment=turns.played))
    assert same.at_most_usd(PRICE, 4e-6) == pytest.approx(10 * (3 * 1 + 4) / 1e6)
    harder = replace(same, played=replace(turns.played, options={"high": 100}))
    assert harder.at_most_usd(PRICE, 4e-6) == turns.at_most_usd(PRICE, 4e-6)


def test_a_first_evaluation_reads_the_system_prompt_with_each_prompt(run: RunFiles) -> None:
    config = worker.read_run(run)
    backend = replace(config.backend, options={"chat_template": True, "system_prompt": "Think. " * 100})
    due = replace(asks(config, 10, text="12="), trained=replace(config, backend=backend))
    assert due.at_most_usd(PRICE, rollout_usd=1.0) == pytest.approx(10 * (703 * 1 + 4 * 2) / 1e6)


def test_an_evaluation_of_another_size_is_set_aside_as_one_that_was_never_made(run: RunFiles) -> None:
    config = worker.read_run(run)
    budget = open_budget(config, run)
    take_step(budget, 0.000012)
    budget.evaluated(due := asks(config, 1), Tokens(sample=10**6))
    budget.ledger.sync()
    for one, usd in ((due, 2.0), (replace(due, samples=3), 3e-6), (asks(config, 5), 5e-6)):
        again = open_budget(config, run)
        assert again.why_to_stop(0, [one], is_step=False) == ""
        assert aside_usd(run) == pytest.approx(usd)


def test_an_evaluation_that_outgrows_what_was_set_aside_goes_on_while_there_is_room(run: RunFiles) -> None:
    config = worker.read_run(run)
    budget = open_budget(config, run)
    take_step(budget, 1.2)
    budget.evaluated(due := asks(config, 1), Tokens(sample=10**6))
    assert budget.why_to_stop(0, [due], is_step=False) == ""  # sets $2 aside
    with budget.evaluating(), pytest.raises(InterruptedRunError, match="no room for another part of an eval"):
        exhaust(budget)
    spent = read_spending(run)
    assert spent is not None
    assert spent.usd is not None
    assert 8.0 < spent.usd <= 10.0  # a quarter of the evaluation more would be too much
    assert asked_to_stop(CampaignFiles(run.directory.parent.parent)) == 1
    spend(budget, 0.1)  # a step is not cut off


def exhaust(budget: Budget) -> None:
    for _ in range(100):
        spend(budget, 0.1)


def aside_usd(run: RunFiles) -> float:
    spent = read_spending(run)
    assert spent is not None
    return spent.set_aside_usd


def spend(budget: Budget, usd: float) -> None:
    with budget.ledger.meter.call(tokens := Tokens(sample=round(usd * 1e6 / 2))) as call:
        call.billed = tokens


def test_evaluations_at_a_runs_end_are_kept_when_it_dies_in_the_next_one(tmp_path: Path) -> None:
    there = tmp_path / "there"
    judged = {"reward": "tests.reward_functions.once_there", "params": {"needs": str(there)}}
    tables = [{"name": "easy"}, {"name": "judged", **judged}]
    training = {**PRICED["training"], "eval_at_start": False}
    files = make_run(tmp_path / "r", {**PRICED, "training": training, "eval": {"tables": tables}})
    assert worker.run(files.directory, threading.Event()) == EXIT_INFRASTRUCTURE
    before = read_spending(files)
    there.touch()
    assert worker.run(files.directory, threading.Event()) == 0
    after, done = read_spending(files), read_done(files.done)
    assert before is not None
    assert after is not None
    assert done is not None
    billed = [done.result[f"eval_{name}billed_sample"] for name in ("judged_", "")]
    assert after.tokens.sample - before.tokens.sample == sum(billed)
    assert done.result["eval_easy_billed_sample"] > 0
    assert [*read_outcomes(files.evals / "easy.jsonl")] == [6]


def test_what_is_left_undone_is_steps_or_the_last_evaluation() -> None:
    runs = [
        RunRow(run_id=f"a_s{seed}", condition="a", seed=seed, state="interrupted", step=step, max_steps=4)
        for seed, step in enumerate((4, 3, 0))
    ]
    assert left_undone(runs) == "a_s0 (the evaluation at its end left), a_s1 (1 step left), a_s2"
