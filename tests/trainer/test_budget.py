"""A campaign costs what its tokens cost, and no more than its budget."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.base.errors import ConfigError, RecordsError
from retrain.base.locks import hold
from retrain.campaign.orchestrate import CampaignOutcome
from retrain.campaign.run import reopen, start
from retrain.config.load import load_config, parse
from retrain.config.prices import Price
from retrain.config.schema import Config
from retrain.plan.build import plan_runs
from retrain.plan.estimate.history import learn
from retrain.plan.explain import explain_plan
from retrain.plan.preflight import preflight
from retrain.records.campaign_state import asked_to_stop
from retrain.records.layout import CampaignFiles, RunFiles, campaign_of
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts
from retrain.records.spending import Spending, Tokens, read_spending, write_spending
from retrain.results.status import survey
from retrain.trainer import worker
from retrain.trainer.budget import Budget, Ledger
from retrain.trainer.source import AsyncSource
from tests.clocks import without_times
from tests.crash_disk import Disk
from tests.crash_run import Unlucky
from tests.stopping import StopAtLook
from tests.trainer.test_trainer import SMALL, make_run, train

PRICES = {"numpy": {"prefill": 1, "cached": 0.5, "sample": 2, "train": 3}}
PRICE = Price(prefill=1, cached=0.5, sample=2, train=3)
COUNTS = ("prefill_tokens", "cached_tokens", "sampled_tokens", "trained_tokens")
PRICED = {**SMALL, "budget": {"prices": PRICES}}
CAMPAIGN = """
[budget.prices.numpy]
sample = 2
train = 3
"""


def test_each_row_tells_the_tokens_since_the_one_before_and_what_they_cost(tmp_path: Path) -> None:
    files = train(tmp_path / "r", PRICED)
    rows, spent = read_metrics(files.directory), read_spending(files)
    assert spent is not None
    assert spent.usd == pytest.approx(spent.tokens.usd(PRICE))
    for row in rows:
        counted = Tokens(*(row[name] for name in COUNTS))
        assert row["cost_usd"] == pytest.approx(counted.usd(PRICE))
        assert counted.sample >= row["tokens_per_step"]
    # the evaluation at the end belongs to no row
    assert sum(row["cost_usd"] for row in rows) < spent.usd
    assert rows[0]["sampled_tokens"] == rows[0]["tokens_per_step"]
    assert rows[0]["cached_tokens"] == 3 * rows[0]["prefill_tokens"]  # groups of four


@pytest.mark.parametrize("looks", [6, 9, 13, 16])
def test_rows_tell_what_was_billed_whenever_a_run_is_resumed(tmp_path: Path, looks: int) -> None:
    """Also of an evaluation that no row had told when its checkpoint was written."""
    raw = {
        **PRICED,
        "training": {**SMALL["training"], "eval_every": 2, "save_every": 2},
        "data": {"task": "copy", "eval_prompts": 3},
        "eval": {"tables": [{"name": "often", "every": 1, "at_start": True, "prompts": 2}]},
    }
    whole, broken = train(tmp_path / "whole", raw), make_run(tmp_path / "broken", raw)
    assert worker.run(broken.directory, StopAtLook(looks)) == 130
    assert worker.run(broken.directory, threading.Event()) == 0
    bills = [
        [tuple(row[name] for name in (*COUNTS, "cost_usd")) for row in read_metrics(files.directory)]
        for files in (whole, broken)
    ]
    assert bills[1] == [pytest.approx(bill) for bill in bills[0]]


def test_a_price_changes_neither_a_run_nor_its_digest(tmp_path: Path) -> None:
    plain, priced = train(tmp_path / "plain"), train(tmp_path / "priced", PRICED)
    rows = [
        {key: value for key, value in row.items() if key not in (*COUNTS, "cost_usd")}
        for row in without_times(read_metrics(priced.directory))
    ]
    assert rows == without_times(read_metrics(plain.directory))
    assert not plain.spend.exists()
    hashes = {plan_runs(parse(raw, "c")).runs[0].config_hash for raw in (SMALL, PRICED)}
    assert len(hashes) == 1


def run_with_budget(file: Path, usd: float) -> CampaignOutcome:
    file.write_text(file.read_text() + CAMPAIGN)
    return start(file, [f"budget.usd={usd}", "campaign.launcher=inline", "campaign.parallel=false"]).execute()


def test_a_campaign_stops_before_its_budget_is_exceeded_and_goes_on_with_a_larger_one(
    campaign_file: Path,
) -> None:
    stopped = run_with_budget(campaign_file, 0.0005)
    files = CampaignFiles(stopped.directory)
    [seen] = survey(stopped.directory)
    assert (stopped.exit_code, seen.state, seen.budget_usd) == (130, "interrupted", 0.0005)
    assert "the budget of $0.00050 has no room for another step" in seen.stopped
    assert seen.cost_usd is not None
    assert 0.0003 < seen.cost_usd <= 0.0005
    assert asked_to_stop(files) == 1
    assert reopen(stopped.directory).execute().exit_code == 130
    assert survey(stopped.directory)[0].cost_usd == seen.cost_usd
    done = reopen(stopped.directory, budget_usd=1).execute()
    [after] = survey(stopped.directory)
    assert (done.exit_code, after.state, after.budget_usd, after.stopped) == (0, "done", 1.0, "")
    assert after.cost_usd == sum(one.cost_usd or 0 for one in after.conditions)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RunFiles, RunFiles]]:
    """Two runs of a campaign, each with a worker."""
    files = CampaignFiles(tmp_path / "c")
    raw = {**PRICED, "budget": {"prices": PRICES, "usd": 10.0}}
    runs = make_run(files.run("a_s0").directory, raw), make_run(files.run("a_s1").directory, raw)
    files.campaign_toml.touch()
    with ExitStack() as held:
        for run in runs:
            lock = hold(run.lock)
            assert lock is not None
            held.enter_context(lock)
        yield runs


def open_budget(config: Config, run: RunFiles, ahead: AsyncSource | None = None) -> Budget:
    return Budget(config, campaign_of(run.directory), Ledger(config, run), ahead)


def take_step(budget: Budget, usd: float) -> None:
    with budget.ledger.meter.call(tokens := Tokens(sample=round(usd * 1e6 / 2))) as call:
        call.billed = tokens
    budget.took_step(12)


def test_a_worker_leaves_what_another_has_set_aside(pair: tuple[RunFiles, RunFiles]) -> None:
    one, other = (open_budget(worker.read_run(files), files) for files in pair)
    assert (one.why_to_stop(0), other.why_to_stop(0)) == ("", "")
    take_step(one, 3.0)
    take_step(other, 3.0)
    assert one.why_to_stop(0) == ""  # 6 are spent, and 3 set aside
    assert "$6.00 are spent, $3.00 are set aside by other runs" in other.why_to_stop(0)
    assert asked_to_stop(CampaignFiles(pair[0].directory.parent.parent)) == 1


def test_what_a_refill_may_sample_is_set_aside(tmp_path: Path) -> None:
    raw = {**PRICED, "data": {**SMALL["data"], "refill": "tied"}, "budget": {"prices": PRICES, "usd": 10.0}}
    files = make_run(tmp_path / "r", raw)
    budget = open_budget(worker.read_run(files), files)
    assert budget.why_to_stop(0) == ""
    with budget.ledger.sampling(12), budget.ledger.meter.call(tokens := Tokens(sample=120_000)) as call:
        call.billed = tokens  # $0.02 a rollout
    budget.took_step(12, trained=Tokens(train=200_000), at_most=48)  # $0.60
    assert budget.why_to_stop(1) == ""
    spent = read_spending(files)
    assert spent is not None
    assert spent.set_aside_usd == pytest.approx(0.60 + 48 * 0.02)
    assert spent.largest_rollout_usd == pytest.approx((0.60 + 12 * 0.02) / 12)


def test_what_a_step_cost_at_other_prices_says_nothing_of_the_next(pair: tuple[RunFiles, RunFiles]) -> None:
    config, files = worker.read_run(pair[0]), pair[0]
    dear = open_budget(config, files)
    take_step(dear, 6.0)
    assert "the next step costs up to $6.00" in dear.why_to_stop(0)
    dear.ledger.close()
    fallen = {"numpy": {kind: usd / 10 for kind, usd in PRICES["numpy"].items()}}
    cheap = open_budget(replace(config, budget=replace(config.budget, prices=fallen)), files)
    assert cheap.why_to_stop(0) == ""


def test_what_a_step_cost_is_set_aside_if_prices_have_risen(pair: tuple[RunFiles, RunFiles]) -> None:
    config, files = worker.read_run(pair[0]), pair[0]
    cheap = open_budget(config, files)
    take_step(cheap, 6.0)
    assert cheap.why_to_stop(0)
    cheap.ledger.close()
    risen = {"numpy": {kind: 2 * usd for kind, usd in PRICES["numpy"].items()}}
    dear = open_budget(replace(config, budget=replace(config.budget, prices=risen)), files)
    assert "the next step costs up to $12.00" in dear.why_to_stop(0)


@pytest.mark.parametrize("times", [0.1, 2])
def test_what_a_step_cost_is_set_aside_at_the_prices_of_now_in_each_later_attempt(
    tmp_path: Path, times: float
) -> None:
    raw = {**PRICED, "budget": {"prices": PRICES, "usd": 1000.0}}
    files = make_run(CampaignFiles(tmp_path / "c").run("a_s0").directory, raw)
    config = worker.read_run(files)
    take_step(before := open_budget(config, files), 6.0)
    assert before.why_to_stop(0) == ""
    prices = {"numpy": {kind: times * usd for kind, usd in PRICES["numpy"].items()}}
    changed = replace(config, budget=replace(config.budget, prices=prices))
    for attempt in range(3):
        budget = open_budget(changed, files)
        assert budget.why_to_stop(0) == ""
        assert (found := read_spending(files)) is not None
        assert found.set_aside_usd == pytest.approx(6.0 * times)
        assert found.usd == pytest.approx(6.0 + attempt * 6.0 * times)
        take_step(budget, 6.0)  # of the earlier prices
        assert budget.why_to_stop(0) == ""


def test_what_a_finished_run_had_set_aside_is_free(pair: tuple[RunFiles, RunFiles]) -> None:
    one, other = (open_budget(worker.read_run(files), files) for files in pair)
    assert (one.why_to_stop(0), other.why_to_stop(0)) == ("", "")
    take_step(one, 3.0)
    take_step(other, 3.0)
    assert one.why_to_stop(0) == ""
    one.ledger.close()
    assert other.why_to_stop(0) == ""


def test_of_a_run_whose_worker_was_killed_the_calls_in_flight_count_until_it_is_tried_again(
    pair: tuple[RunFiles, RunFiles],
) -> None:
    one = open_budget(worker.read_run(pair[0]), pair[0])
    killed = open_budget(worker.read_run(pair[1]), files := RunFiles(pair[1].directory.parent / "a_s2"))
    shutil.copytree(pair[1].directory, files.directory)
    take_step(killed, 3.0)
    assert killed.why_to_stop(0) == ""  # sets $3 aside
    with killed.ledger.meter.call(Tokens(sample=500_000)):
        in_flight = files.spend.read_bytes()
    files.spend.write_bytes(in_flight)  # as a kill leaves it
    take_step(one, 3.0)
    assert one.why_to_stop(0) == ""
    take_step(one, 3.0)
    assert "$9.00 are spent, $1.00 are set aside by other runs" in one.why_to_stop(0)


@pytest.mark.parametrize("usd", [None, 5.0, 20.0])
def test_a_worker_that_a_resume_adopts_keeps_the_budget_of_now(
    pair: tuple[RunFiles, RunFiles], usd: float | None
) -> None:
    config = worker.read_run(pair[0])  # of $10
    budget = open_budget(replace(config, budget=replace(config.budget, usd=usd)), pair[0])
    for _ in range(3):
        assert budget.why_to_stop(0) == ""
        take_step(budget, 3.0)
    assert "the budget of $10.00 has no room for another step: $9.00 are spent" in budget.why_to_stop(0)


def test_a_call_that_a_kill_cut_off_counts_in_full(pair: tuple[RunFiles, RunFiles]) -> None:
    files = pair[0]
    killed = open_budget(worker.read_run(files), files)
    with killed.ledger.meter.call(Tokens(sample=4_000_000)):
        in_flight = files.spend.read_bytes()
    files.spend.write_bytes(in_flight)  # as a kill leaves it
    again = open_budget(worker.read_run(files), files)
    found = read_spending(files)
    assert found is not None
    assert (found.spent_usd, found.unsure, found.open) == (8.0, Tokens(sample=4_000_000), Tokens())
    take_step(again, 2.0)
    assert "no room for another step: $10.00 are spent" in again.why_to_stop(0)


def test_a_call_that_was_refused_costs_nothing(pair: tuple[RunFiles, RunFiles]) -> None:
    budget = open_budget(worker.read_run(pair[0]), pair[0])
    with budget.ledger.meter.call(Tokens(sample=4_000_000)) as call:
        call.billed = Tokens()
    assert (found := read_spending(pair[0])) is not None
    assert found.spent_usd == 0.0


def test_a_power_loss_takes_nothing_of_what_was_billed(
    pair: tuple[RunFiles, RunFiles], tmp_path: Path
) -> None:
    run, kept = pair[0], tmp_path / "kept"
    disk = Disk(run.directory, loses_power=True)
    with disk.installed():
        budget = open_budget(worker.read_run(run), run)
        for _ in range(2):
            with budget.ledger.meter.call(Tokens(sample=4)) as call:
                call.billed = Tokens(sample=3)
        with pytest.raises(KeyError), budget.ledger.meter.call(Tokens(sample=4)):
            raise KeyError  # nobody learns what it was billed
    kept.mkdir()
    disk.image(Unlucky(), kept)
    found = read_spending(RunFiles(kept))
    assert found is not None
    assert (found.tokens, found.unsure) == (Tokens(sample=6), Tokens(sample=4))


def test_damaged_spending_is_not_taken_for_none(pair: tuple[RunFiles, RunFiles]) -> None:
    write_spending(pair[0], Spending())
    pair[0].spend.write_text(pair[0].spend.read_text().replace('"sample": 0', '"sample": -1'))
    with pytest.raises(RecordsError, match=r"spend\.json: does not tell what was spent"):
        open_budget(worker.read_run(pair[1]), pair[1]).why_to_stop(0)


def test_a_run_whose_spending_is_damaged_says_so(tmp_path: Path) -> None:
    files = make_run(tmp_path / "r", PRICED)
    files.spend.write_text(json.dumps({"tokens": 3}))
    assert worker.run(files.directory, threading.Event()) != 0
    assert "does not tell what was spent" in read_attempts(files.attempts)[-1].message


@pytest.mark.parametrize("command", ["run", "resume"])
@pytest.mark.parametrize("usd", ["0", "-5", "nan", "inf"])
def test_a_budget_that_is_no_amount_of_money_is_refused(retrain: Callable, command: str, usd: str) -> None:
    done = retrain(command, "c.toml", f"--budget-usd={usd}")
    assert done.returncode == 2
    assert f"Invalid value for '--budget-usd': got {usd}; needs more than 0 dollars" in done.stderr


def test_a_model_that_costs_nothing_never_reaches_its_budget(campaign_file: Path) -> None:
    campaign_file.write_text(campaign_file.read_text() + "[budget.prices.numpy]\nsample = 0\n")
    alone = ["budget.usd=0.01", "campaign.launcher=inline", "campaign.seeds=[0]"]
    done = start(campaign_file, alone).execute()
    assert (done.exit_code, survey(done.directory)[0].cost_usd) == (0, 0.0)


def test_a_budget_without_a_price_is_refused_before_anything_starts() -> None:
    plan = plan_runs(parse({**SMALL, "budget": {"usd": 5}}, "c.toml"))
    with pytest.raises(ConfigError, match=r'\[budget\]\.usd: the price of "numpy" is not known'):
        preflight(plan, "c.toml")


def test_explain_tells_what_a_plan_costs_from_a_pilot(campaign_file: Path) -> None:
    text = campaign_file.read_text() + CAMPAIGN
    text = text.replace("seeds = [0, 1]", "seeds = [0]").replace("save_every = 2", "save_every = 0")
    campaign_file.write_text(text)
    pilot = start(campaign_file, ["campaign.launcher=inline", "campaign.parallel=false"]).execute()
    overrides = ["campaign.launcher=inline", "campaign.parallel=false", "campaign.max_steps=24"]
    plan = plan_runs(load_config(campaign_file, overrides), "c")
    explained = explain_plan(plan, preflight(plan, "c"), learn(pilot.directory), 1.0, "c.toml")
    bill = survey(start(campaign_file, overrides).execute().directory)[0].cost_usd
    assert explained.cost is not None
    assert bill is not None
    assert explained.cost.p50_usd == pytest.approx(bill, rel=0.15)  # 4 steps a run tell 24
    assert explained.cost.p50_usd < explained.cost.p90_usd < 1.5 * explained.cost.p50_usd
    known = [one.cost_usd for one in survey(pilot.directory)[0].conditions]
    again = plan_runs(load_config(campaign_file), "c")
    same = explain_plan(again, preflight(again, "c"), learn(pilot.directory), 1.0, "c.toml").cost
    assert same is not None
    assert [one.p50_usd for one in same.conditions] == pytest.approx(known)


def test_explain_tells_that_a_plan_may_cost_more_than_its_budget(campaign_file: Path) -> None:
    stopped = run_with_budget(campaign_file, 0.0005)
    plan = plan_runs(load_config(campaign_file, ["budget.usd=0.0005"]), "c")
    explained = explain_plan(plan, preflight(plan, "c"), learn(stopped.directory), 1.0, "c.toml")
    assert any(
        "more than its budget of $0.00050, at which it would stop" in one for one in explained.warnings
    )
    unknown = explain_plan(plan, preflight(plan, "c"), None, 1.0, "c.toml")
    assert (unknown.cost, unknown.cost_unknown) == (
        None,
        "no earlier run of these conditions has counted its tokens",
    )


def test_without_a_pilot_explain_tells_prices_and_the_most_that_it_can_cost(
    campaign_file: Path, retrain: Callable
) -> None:
    """2 prompts of 3 characters ("ab=") x 4 rollouts x 4 tokens; 4 runs of 4 steps."""
    campaign_file.write_text(campaign_file.read_text() + "[budget]\nusd = 5\n" + CAMPAIGN)
    plan = plan_runs(load_config(campaign_file), "c")
    checked = preflight(plan, "c")
    found = explain_plan(plan, checked, None, 1.0, "c.toml")
    reading = checked.readings["grpo"]
    step_usd = (2 * 4 * 4 * 2 + 2 * 4 * (reading.longest + 4) * 3) / 1e6
    evaluation_usd = reading.held_out[0] * 4 * 2 / 1e6
    assert found.cost_at_most is not None
    assert found.cost_at_most.step_usd == pytest.approx(step_usd)
    assert found.cost_at_most.campaign_usd == pytest.approx(
        4 * (4 * step_usd + evaluation_usd) + 2 * evaluation_usd  # before training, for each of two seeds
    )
    bill = survey(
        start(campaign_file, ["campaign.launcher=inline", "campaign.parallel=false"]).execute().directory
    )
    assert 0 < bill[0].cost_usd <= found.cost_at_most.campaign_usd
    shown = retrain("explain", campaign_file).stdout
    assert "budget                  $5.00, at which it stops" in shown
    assert "numpy: prompts $0, cached $0, sampled $2, trained $3 ([budget.prices])" in shown
    assert "cost, at most           $" in shown


def test_a_forecast_counts_evaluations_that_the_pilot_did_not_reach(campaign_file: Path) -> None:
    text = campaign_file.read_text().replace("save_every = 2", "save_every = 0\neval_every = 5")
    campaign_file.write_text(text + CAMPAIGN)
    alone = ["campaign.launcher=inline", "campaign.seeds=[0]"]
    pilot = start(campaign_file, alone).execute()  # of 4 steps
    longer = [*alone, "campaign.max_steps=12"]
    plan = plan_runs(load_config(campaign_file, longer), "tiny.toml")
    found = explain_plan(plan, preflight(plan, "tiny.toml"), learn(pilot.directory), 2.0, "tiny.toml").cost
    assert found is not None
    done = start(campaign_file, longer).execute()
    assert found.p50_usd == pytest.approx(survey(done.directory)[0].cost_usd, rel=0.05)
