"""Prices of tokens: what a table may hold, and what is said of those that are wrong, old or not used."""

from __future__ import annotations

from datetime import date
from math import nan
from pathlib import Path

import pytest

from retrain.base.errors import ConfigError
from retrain.campaign import Observer
from retrain.campaign.run import start
from retrain.config.load import parse
from retrain.config.prices import Price, age_notice, price_of
from retrain.plan.build import plan_runs
from retrain.records.text import dollars
from tests.trainer.test_budget import CAMPAIGN
from tests.trainer.test_trainer import SMALL


@pytest.mark.parametrize(
    ("prices", "said"),
    [
        ({"numpy": 3}, "[budget.prices].numpy: got 3; needs a table"),
        ({"numpy": {}}, "[budget.prices].numpy: got {}; needs a table"),
        ({"numpy": {"sampel": 3}}, "[budget.prices.numpy].sampel: unknown key; did you mean 'sample'?"),
        ({"a/b": {"sample": "3"}}, '[budget.prices."a/b"].sample: got "3"; needs dollars'),
        ({"numpy": {"sample": -1}}, "[budget.prices.numpy].sample: got -1; needs dollars"),
        ({"numpy": {"sample": nan}}, "[budget.prices.numpy].sample: got nan; needs dollars"),
        ({"numpy": {"sample": 1e300}}, "[budget.prices.numpy].sample: got 1e+300; needs dollars"),
        (
            {"numpy": {"sample": 10**400}},
            "000…; needs dollars per million tokens, from 0 to 1,000,000,000",
        ),
        ({"numpy": {"sample": True}}, "[budget.prices.numpy].sample: got true; needs dollars"),
    ],
)
def test_a_wrong_price_is_refused(prices: dict, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse({**SMALL, "budget": {"prices": prices}}, "c.toml")
    assert said in str(raised.value)


def test_prices_under_a_name_that_no_run_has_are_named(campaign_file: Path) -> None:
    misspelt = CAMPAIGN.replace("numpy", "numpi")
    campaign_file.write_text(campaign_file.read_text() + misspelt)
    said = "tiny.toml [budget.prices].numpi: no run has a model of this name; did you mean 'numpy'?"
    with pytest.raises(ConfigError) as raised:
        start(campaign_file, ["budget.usd=3"])
    assert said in str(raised.value)
    assert notices(campaign_file) == [said]
    campaign_file.write_text(campaign_file.read_text() + CAMPAIGN)  # the other may be of another file's model
    assert notices(campaign_file) == []


def notices(file: Path) -> list[str]:
    """Return what the start of a campaign tells its user."""
    told: list[str] = []

    class Told(Observer):
        def notice(self, text: str) -> None:
            told.append(text)

    start(file, observer=Told())
    return told


def test_a_cached_prompt_costs_as_much_as_another_unless_told() -> None:
    config = plan_runs(parse({**SMALL, "budget": {"prices": {"numpy": {"prefill": 3}}}}, "c")).runs[0].config
    assert price_of(config) == Price(prefill=3, cached=3, sample=0, train=0)


def test_old_prices_are_told() -> None:
    known = Price(1, 1, 1, 1, source="a page", as_of="2026-01-01")
    assert age_notice(known, date(2026, 4, 1)) == ""
    assert "of 2026-01-01, 91 days ago: compare them with a page" in age_notice(known, date(2026, 4, 2))


@pytest.mark.parametrize(
    ("usd", "said"), [(12.3, "$12.30"), (0, "$0.00"), (0.0042, "$0.0042"), (1234.5, "$1,234.50"), (None, "-")]
)
def test_dollars_are_told_with_the_digits_that_count(usd: float | None, said: str) -> None:
    assert dollars(usd) == said
