"""What `explain` forecasts of a cost, and what a run has cost whose prices changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.campaign.run import start
from retrain.config.load import load_config
from retrain.config.schema import BudgetSection
from retrain.plan.build import plan_runs
from retrain.plan.estimate.history import learn
from retrain.plan.estimate.money import Billed, cost_forecast
from retrain.plan.estimate.wall_time import Learned, learned_for
from retrain.plan.estimate.workload import NORMAL_P90
from retrain.plan.matrix import Plan
from retrain.records.layout import RunFiles
from retrain.records.spending import Tokens, read_spending
from retrain.trainer import worker
from tests.trainer.test_budget import CAMPAIGN, PRICED, open_budget, take_step
from tests.trainer.test_trainer import make_run


@pytest.fixture
def piloted(campaign_file: Path) -> tuple[Plan, Learned]:
    """A plan of 2 conditions x 2 seeds x 4 steps, and what a pilot of it told."""
    campaign_file.write_text(campaign_file.read_text() + CAMPAIGN)
    pilot = start(campaign_file, ["campaign.launcher=inline", "campaign.parallel=false"]).execute()
    plan = plan_runs(load_config(campaign_file), "c")
    learned = learned_for(plan, learn(pilot.directory), 1.0)
    assert learned is not None
    return plan, learned


def of_runs(learned: Learned, *runs: list[int]) -> Learned:
    """Return the same, with runs whose steps sampled so many tokens, in every condition."""
    billed = tuple(Billed(tuple(Tokens(sample=one) for one in steps), {}, None, 0) for steps in runs)
    known = learned.conditions.items()
    conditions = {name: replace(one, billed=billed, evaluations={}) for name, one in known}
    return replace(learned, conditions=conditions)


def test_runs_that_differ_as_their_steps_explain_are_taken_for_equal(piloted: tuple[Plan, Learned]) -> None:
    """Two runs of 8 steps, of 100 or 300 tokens, with means of 200 and 225."""
    plan, learned = piloted
    found = cost_forecast(plan, of_runs(learned, [100, 300] * 4, [100, 300] * 3 + [300, 300]))
    assert found is not None
    usd_per_token = 2e-6
    variance = (7 * 112.5**2 + 9 * 87.5**2) / 16 * usd_per_token**2  # of a step; 16 of them are known
    steps = 2 * 4  # of a condition
    each = steps * variance + steps**2 * variance / 16
    assert found.p50_usd == pytest.approx(2 * steps * 212.5 * usd_per_token)
    assert found.p90_usd - found.p50_usd == pytest.approx(NORMAL_P90 * (2 * each) ** 0.5)


def test_runs_that_differ_more_than_their_steps_widen_the_forecast(piloted: tuple[Plan, Learned]) -> None:
    """Steps that are all equal explain nothing: means of 90 and 110 have a standard deviation of 14.1 %."""
    plan, learned = piloted
    found = cost_forecast(plan, of_runs(learned, [90] * 8, [110] * 8))
    assert found is not None
    of_steps, of_run = 10.0**2, 200.0
    each = 8 * of_steps + 2 * 4**2 * of_run + 8**2 * (of_steps / 16 + of_run / 2)
    assert found.p90_usd - found.p50_usd == pytest.approx(NORMAL_P90 * (2 * each) ** 0.5 * 2e-6)


def test_questions_that_are_asked_beside_the_evaluations_of_a_run_cost_as_theirs(
    piloted: tuple[Plan, Learned],
) -> None:
    """Four runs, at 50 tokens for an evaluation of its own size, three times as many on average."""
    plan, learned = piloted
    learned = of_runs(learned, [100] * 8)
    conditions = {
        name: replace(
            one,
            billed=tuple(
                replace(past, evaluations={"eval_hard_": (Tokens(sample=50),)}) for past in one.billed
            ),
            evaluations={"eval_hard_": 1},
        )
        for name, one in learned.conditions.items()
    }
    learned = replace(learned, conditions=conditions)
    without, found = (cost_forecast(plan, replace(learned, further=f)) for f in ({}, {"eval_hard_": 3.0}))
    assert without is not None
    assert found is not None
    assert found.p50_usd - without.p50_usd == pytest.approx(4 * 3 * 50 * 2e-6)


def test_explain_shows_the_tokens_of_a_step(piloted: tuple[Plan, Learned], retrain: Callable) -> None:
    plan, learned = piloted
    shown = retrain("explain", "tiny.toml", "--from", "logs").stdout.splitlines()
    found = cost_forecast(plan, learned)
    assert found is not None
    first, second = found.conditions
    (place,) = (number for number, line in enumerate(shown) if line.startswith("tokens of a step "))
    for line, one in zip(shown[place : place + 2], (first, second), strict=True):
        told = line.removeprefix("tokens of a step").strip()
        assert told == (
            f"{one.condition}: prompts {one.prefill_tokens:,.0f}, cached {one.cached_tokens:,.0f}, "
            f"sampled {one.sampled_tokens:,.0f}, trained {one.trained_tokens:,.0f}"
        )
        assert one.cached_tokens > one.prefill_tokens > 0


@pytest.fixture
def killed(tmp_path: Path) -> RunFiles:
    """A run that was billed $3, and killed in a call of at most $1."""
    run = make_run(tmp_path / "r", PRICED)
    budget = open_budget(worker.read_run(run), run)
    take_step(budget, 3.0)
    with budget.ledger.meter.call(Tokens(sample=500_000)):
        in_flight = run.spend.read_bytes()
    run.spend.write_bytes(in_flight)
    return run


def test_what_was_billed_before_a_price_changed_keeps_its_price(killed: RunFiles) -> None:
    dearer = replace(worker.read_run(killed), budget=BudgetSection(prices={"numpy": {"sample": 20}}))
    take_step(open_budget(dearer, killed), 3.0)  # of the earlier prices
    spent = read_spending(killed)
    assert spent is not None
    assert (spent.usd, spent.unsure_usd) == (3.0 + 30.0, 1.0)


def test_a_run_whose_price_is_not_known_any_more_tells_no_dollars(killed: RunFiles) -> None:
    unpriced = replace(worker.read_run(killed), budget=BudgetSection())
    take_step(open_budget(unpriced, killed), 3.0)
    spent = read_spending(killed)
    assert spent is not None
    assert (spent.usd, spent.unsure_usd, spent.tokens.sample) == (None, None, 3_000_000)


def test_conditions_measured_by_the_same_runs_count_once(piloted: tuple[Plan, Learned]) -> None:
    plan, learned = piloted
    others = [replace(run, condition=f"new {number}") for number in range(50) for run in plan.runs[:1]]
    more = learned_for(replace(plan, runs=(*plan.runs, *others)), learned.history, 1.0)
    assert more is not None
    assert (more.pilot.steps, len(more.conditions)) == (learned.pilot.steps, len(learned.conditions) + 50)
