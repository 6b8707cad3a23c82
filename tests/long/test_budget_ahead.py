"""A budget has room for what is sampled ahead of training, and without that room nothing is."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.base.rollouts import Prompt
from retrain.config.flow import flow_settings
from retrain.config.schema import Config, RateLimiterSection
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_done
from retrain.records.spending import Tokens, read_spending
from retrain.trainer import worker
from retrain.trainer.prompts import open_stream
from retrain.trainer.source import AsyncSource
from tests.long.test_budget_evaluations import aside_usd, asks, spend
from tests.long.test_budget_evaluations import run as run
from tests.trainer.test_async_source import sampled
from tests.trainer.test_budget import PRICED, open_budget
from tests.trainer.test_trainer import train


def sampling_ahead(config: Config, steps: int) -> AsyncSource:
    """Return a source of batches of 3 groups, up to five of them ahead."""
    settings = flow_settings(replace(config, rate_limiter=RateLimiterSection(max_staleness=4, capacity=20)))
    assert settings is not None
    prompts = open_stream([Prompt(n, "1=", "2") for n in range(9)], "shuffle", {}, 0)
    return AsyncSource(prompts, sampled, replace(settings, steps=steps), workers=1, seed=0, overlaps=True)


def test_all_that_may_be_sampled_ahead_is_set_aside_with_a_step_and_beside_an_evaluation(
    run: RunFiles,
) -> None:
    config = worker.read_run(run)
    budget = open_budget(config, run, source := sampling_ahead(config, steps=100))
    assert budget.why_to_stop(0) == ""
    assert source.most_groups(1, held=True) == 3  # nothing is known: only the step's own
    with budget.ledger.sampling(12):
        spend(budget, 0.24)  # $0.02 a rollout
    budget.took_step(12, Tokens(train=200_000))  # $0.60
    budget.evaluated(due := asks(config, 1), Tokens(sample=500_000))
    assert budget.why_to_stop(0) == ""
    assert aside_usd(run) == pytest.approx(0.60 + 6 * 3 * 4 * 0.02)
    source.next_groups(3, 3, 0)
    with source.updating(1):
        pass
    while source.most_groups(0, held=False):  # until five batches are buffered
        time.sleep(0.001)
    assert budget.why_to_stop(0, [due], is_step=False) == ""
    assert aside_usd(run) == pytest.approx(1.0)
    assert budget.why_to_stop(0, [due]) == ""
    assert aside_usd(run) == pytest.approx(0.60 + 3 * 4 * 0.02 + 1.0)
    source.close()


def test_a_budget_without_room_to_sample_ahead_still_takes_steps(run: RunFiles) -> None:
    config = worker.read_run(run)
    budget = open_budget(config, run, source := sampling_ahead(config, steps=100))
    with budget.ledger.sampling(12):
        spend(budget, 2.4)  # $0.20 a rollout
    budget.took_step(12)
    for step in range(3):
        assert budget.why_to_stop(0) == ""
        assert aside_usd(run) == pytest.approx(2.4)
        source.next_groups(3, 3, step)
        spend(budget, 2.4)
        with source.updating(step + 1):
            pass
        assert source.state_dict()["prompts"]["drawn"] == 3 * (step + 1)
    assert "no room for another step: $9.60 are spent" in budget.why_to_stop(0)
    source.close()


def test_a_warm_up_tells_nothing_of_what_sampling_costs(run: RunFiles) -> None:
    """So nothing is sampled ahead, also by the attempt after one that was killed during its first step."""
    config = worker.read_run(run)
    first = sampling_ahead(config, steps=100)
    spend(before := open_budget(config, run, first), 0.1)
    before.took_step()
    before.ledger.sync()
    again = sampling_ahead(config, steps=100)
    for budget, source in ((before, first), (open_budget(config, run, again), again)):
        assert budget.why_to_stop(0) == ""
        source.next_groups(3, 3, 0)
        with source.updating(1):
            pass
        assert source.state_dict()["prompts"]["drawn"] == 3
        source.close()


def test_a_run_that_samples_ahead_is_billed_for_its_steps_alone(tmp_path: Path) -> None:
    raw = {**PRICED, "rate_limiter": {"max_staleness": 4}}
    files = train(tmp_path / "r", raw)
    spent = read_spending(files)
    assert spent is not None
    assert (done := read_done(files.done)) is not None
    of_steps = sum(row["tokens_per_step"] for row in read_metrics(files.directory))
    at_start = json.loads(files.start.read_text())["metrics"]["eval_billed_sample"]
    assert spent.tokens.sample == at_start + of_steps + done.result["eval_billed_sample"]
