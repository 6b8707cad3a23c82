"""Prices of tokens: those of `[budget.prices]`, else those that the backend knows of its models.

A model that is in neither has no price: its cost is not known, and not 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import date
from typing import TYPE_CHECKING

from retrain.base import registry
from retrain.base.errors import Problem, as_key
from retrain.config.keys import quote
from retrain.config.schema import Config

if TYPE_CHECKING:  # workers, which read prices, do without pydantic
    from retrain.config.checks import Draft

STALE_DAYS = 90  # of a table: Tinker's prices changed more than once in 2026
GIVEN = "[budget.prices]"
HIGHEST = 10**9  # dollars per million tokens; products with counts of tokens stay finite


@dataclass(frozen=True, slots=True)
class Price:
    """What the tokens of a model cost, in dollars per million."""

    prefill: float  # of a prompt that is read in full
    cached: float  # of a prompt, or the start of one, that was read before
    sample: float
    train: float
    source: str = GIVEN
    as_of: str = ""  # date of the source; "" for prices that the user gives


KINDS = tuple(field.name for field in fields(Price) if field.type == "float")


def priced_as(config: Config) -> str:
    """Return the name under which `[budget.prices]` has a run's price."""
    return config.model.model or config.backend.backend


def price_of(config: Config) -> Price | None:
    """Return the price of a run's model; None if it is not known."""
    costs_given = config.budget.prices.get(priced_as(config))
    if costs_given is not None:
        costs = dict.fromkeys(KINDS, 0.0) | {"cached": costs_given.get("prefill", 0.0)} | costs_given
        prefill, cached, sample, train = (float(costs[kind]) for kind in KINDS)
        return Price(prefill, cached, sample, train)
    price: Price | None = registry.ask("backends", config.backend.backend, "price", config)
    return price


def age_notice(price: Price, today: date) -> str:
    """Return that prices are old, and what to do; "" if they are not."""
    if not price.as_of or (days := (today - date.fromisoformat(price.as_of)).days) <= STALE_DAYS:
        return ""
    return (
        f"the prices that retrain knows are of {price.as_of}, {days} days ago: compare them with "
        f"{price.source}, and give those that changed in {GIVEN}"
    )


def missing_price(config: Config) -> Problem | None:
    """Return that a run's budget cannot be kept, as its price is not known; None if it can."""
    if config.budget.usd is None or price_of(config) is not None:
        return None
    return Problem(("budget", "usd"), unpriced(priced_as(config)))


def misnamed_prices(configs: Collection[Config]) -> Iterator[Problem]:
    """Iterate over tables of `[budget.prices]` that no run uses, while the price of some run is not known."""
    unknown = {priced_as(config) for config in configs if price_of(config) is None}
    tables = {name for config in configs for name in config.budget.prices}
    for name in sorted(tables - set(map(priced_as, configs))) if unknown else ():
        lacking = f"the price of {' and '.join(map(quote, sorted(unknown)))} is not known"
        advice = registry.hint(name, unknown, lacking)
        yield Problem(("budget", "prices", name), f"no run has a model of this name; {advice}")


def unpriced(name: str) -> str:
    """Return that a price is not known, and where to give it."""
    return (
        f"the price of {quote(name)} is not known; give it in [budget.prices.{as_key(name)}], "
        "in dollars per million tokens, as sample = 0.6"
    )


def check_prices(draft: Draft) -> Iterator[Problem]:
    """Check the tables of `[budget.prices]`."""
    kinds = ", ".join(KINDS)
    for name, table in draft.config.budget.prices.items() if draft.is_sound("budget") else ():
        at: tuple[str, ...] = ("budget", "prices", name)
        if not isinstance(table, Mapping) or not table:
            what = f"needs a table with some of {kinds}, in dollars per million tokens"
            yield Problem(at, f"got {quote(table)}; {what}")
            continue
        for kind, cost in table.items():
            if kind not in KINDS:
                yield Problem((*at, kind), f"unknown key; {registry.hint(kind, KINDS, f'known: {kinds}')}")
            elif isinstance(cost, bool) or not isinstance(cost, int | float) or not 0 <= cost <= HIGHEST:
                what = f"needs dollars per million tokens, from 0 to {HIGHEST:,}"
                yield Problem((*at, kind), f"got {quote(cost)}; {what}")
