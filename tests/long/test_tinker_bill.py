"""A forecast from a pilot is what a server bills for the campaign, by its own meter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from retrain.campaign.run import run_campaign
from retrain.config.load import load_config
from retrain.plan.build import plan_runs
from retrain.plan.estimate.history import learn
from retrain.plan.explain import explain_plan
from retrain.plan.preflight import preflight
from retrain.records.metrics import read_metrics
from retrain.records.spending import Tokens
from tests.budget_kills import ALPHABET, PRICE, PRICES
from tests.tinker_api.running import MODEL, RunningServer, serve, write_tokenizer
from tests.tinker_api.sdk import CALLS_SDK

pytestmark = [*CALLS_SDK, pytest.mark.timeout(900)]
# lengths are random: the error of 4,000 completions in the pilot is about a percent, so 5 % is no chance
CAMPAIGN = f"""
[model]
model = "{MODEL}"
base_url = "{{url}}"

[training]
batch_size = 8
group_size = 16
max_tokens = 6
max_steps = 20
eval_every = 6
temperature = 1.0
lr = 1e-4

[data]
task = "successor"
options = {{{{ digits = 1, base = 5, held_out = 0.4 }}}}
eval_samples = 8

[[eval]]
name = "often"
every = 4

[rate_limiter]
max_staleness = 1

[reward]
reward = "partial"

[backend]
backend = "tinker"
options = {{{{ tokenizer = "{{tokenizer}}" }}}}

{PRICES}

[campaign]
seeds = [0, 1]
launcher = "inline"
"""


@pytest.fixture
def server(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    yield from serve(here, monkeypatch, ALPHABET)


def bill_usd(server: RunningServer) -> float:
    return Tokens(**server.stats()["billed"]).usd(PRICE)


def test_a_forecast_is_within_5_percent_of_the_servers_bill(here: Path, server: RunningServer) -> None:
    file = here / "campaign.toml"
    tokenizer = write_tokenizer(here / "tokenizer", ALPHABET)
    file.write_text(CAMPAIGN.format(url=server.url, tokenizer=tokenizer))
    assert run_campaign(file, ["training.max_steps=15"]).exit_code == 0
    pilot_usd, others = bill_usd(server), ["campaign.seeds=[2, 3]"]
    plan = plan_runs(load_config(file, others), str(file))
    cost = explain_plan(plan, preflight(plan, str(file)), learn(here / "logs"), 2.0, str(file)).cost
    done = run_campaign(file, others)
    assert done.exit_code == 0
    assert cost is not None
    assert cost.p50_usd == pytest.approx(bill_usd(server) - pilot_usd, rel=0.05)
    rows = [row for run in (done.directory / "runs").iterdir() for row in read_metrics(run)]
    assert any(row["zero_signal_group_fraction"] > 0 for row in rows)  # groups that nothing is trained on
    assert any(row["rate_sample_age_max"] > 0 for row in rows)
