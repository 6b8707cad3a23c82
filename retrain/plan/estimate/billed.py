"""What a run was billed, from its records: its steps, its evaluations, and what belongs to neither."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise

from retrain.config.prices import Price
from retrain.records.layout import RunFiles
from retrain.records.lines import Row
from retrain.records.metrics import read_ends
from retrain.records.run_state import Done
from retrain.records.spending import Tokens, read_spending, tokens_of

KINDS = tuple(one.name for one in fields(Tokens))


@dataclass(frozen=True, slots=True)
class Billed:
    """Tokens of one run."""

    steps: tuple[Tokens, ...]  # usual ones, oldest first
    evaluations: Mapping[str, tuple[Tokens, ...]]  # of each time, by prefix of their columns
    rest: Tokens | None  # all but evaluations, or a part of it without steps; None if not known
    rest_steps: int  # usual steps in `rest`

    def with_passes(self, ratio: float) -> Billed:
        """Return what it would be with so many times as many passes over each batch."""
        steps = tuple(replace(one, train=round(ratio * one.train)) for one in self.steps)
        if not steps or self.rest is None:
            return replace(self, steps=steps)
        more = sum(steps, Tokens()) - sum(self.steps, Tokens())
        more = replace(more, train=round(self.rest_steps * more.train / len(steps)))
        return replace(self, steps=steps, rest=self.rest + more)

    def once_usd(self, price: Price) -> float | None:
        """Return what belongs to no step or evaluation: the warm-up, rollouts that were sampled ahead."""
        if self.rest is None or not self.steps:
            return None
        return self.rest.usd(price) - self.rest_steps * mean_usd(self.steps, price)


def mean_usd(tokens: Sequence[Tokens], price: Price) -> float:
    """Return what they cost on average, in dollars."""
    return statistics.fmean(one.usd(price) for one in tokens)


def keys_of(evaluation: str) -> tuple[str, ...]:
    """Return the columns of what an evaluation was billed, given their prefix."""
    return tuple(f"{evaluation}billed_{kind}" for kind in KINDS)


def billed_of(
    files: RunFiles, rows: Sequence[Row], evaluations: Collection[str], done: Done | None, ahead: int
) -> Billed:
    """Read what a run was billed; `rows` are its last, `evaluations` the prefixes of their columns.

    Rollouts of up to `ahead` steps were sampled before their own.
    """
    ending = rows[-1] if done is None else dict(done.result)  # which has the last row's evaluations
    found = {name: tuple(_evaluated(name, (*rows[:-1], ending))) for name in evaluations}
    steps = tuple(_steps(rows, evaluations))
    steps = steps[ahead : len(steps) - (ahead + 1 if ahead and done else 0)] or steps
    if done is None:
        return Billed(steps, found, None, 0)
    count, spent = int(rows[-1]["step"]), read_spending(files)
    if spent and len(rows) == count and all(row["attempt"] == 1 for row in rows):
        return Billed(steps, found, spent.tokens - sum(chain(*found.values()), Tokens()), count)
    warm_up = read_ends(files.warmup, len(rows)).last
    return Billed(steps, found, sum(filter(None, map(tokens_of, warm_up)), Tokens()), 0)


def _steps(rows: Sequence[Row], evaluations: Collection[str]) -> Iterator[Tokens]:
    """Iterate over the tokens of all steps but each attempt's first, in which others may be sampled ahead.

    Likewise the caller leaves out those after it, and a run's last ones, for which nothing is left to sample.
    """
    for before, row in pairwise(rows):
        if before["attempt"] == row["attempt"] and (tokens := tokens_of(row)) is not None:
            yield tokens - sum(_all_evaluated(evaluations, before), Tokens())


def _all_evaluated(evaluations: Iterable[str], row: Row) -> Iterator[Tokens]:
    """Iterate over the tokens of a row's evaluations, which the row after it counts as well."""
    return chain.from_iterable(_evaluated(name, (row,)) for name in evaluations)


def _evaluated(name: str, rows: Iterable[Row]) -> Iterator[Tokens]:
    """Iterate over an evaluation's tokens, each time."""
    for row in rows:
        found = {kind: row.get(key) for kind, key in zip(KINDS, keys_of(name), strict=True)}
        counts = {kind: count for kind, count in found.items() if isinstance(count, int)}
        if counts:
            yield Tokens(**counts)
