"""What a run has spent at an API (spend.json), and the states that it has saved there (states.jsonl).

A worker rewrites spend.json before and after each call that is billed, so that a kill loses no call: one
whose end was not recorded counts with what it could cost at most. Each run has a file of its own, written by
its worker alone; a campaign's spending is their sum, read without locks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from retrain.base.clock import utc_now
from retrain.base.errors import DamagedRecordError
from retrain.config.keys import quote
from retrain.records.files import read_json, record_of, write_json
from retrain.records.layout import RunFiles
from retrain.records.lines import append_line, is_count, parse_line, read_lines

if TYPE_CHECKING:
    from retrain.config.prices import Price

MILLION = 1e6
MOST = 1e15  # tokens or dollars; more is damage
LEARNED = ("largest_step_usd", "largest_rollout_usd", "largest_sampled_usd", "largest_trained_usd")
COUNTS = ("prefill_tokens", "cached_tokens", "sampled_tokens", "trained_tokens")  # keys of a row


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens that an API bills, by what they cost."""

    prefill: int = 0
    cached: int = 0
    sample: int = 0
    train: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Tokens) -> Tokens:
        return Tokens(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def usd(self, price: Price) -> float:
        """Return what they cost, in dollars."""
        return math.fsum(count * getattr(price, kind) for kind, count in asdict(self).items()) / MILLION


def tokens_of(row: Mapping[str, object]) -> Tokens | None:
    """Return the tokens that a row of metrics.jsonl counts; None if it counts none."""
    counts = [count for key in COUNTS if is_count(count := row.get(key))]
    return Tokens(*counts) if len(counts) == len(COUNTS) else None


@dataclass(frozen=True, slots=True)
class EvaluationCost:
    """What an evaluation, of the run's own or an `[[eval]]`, costs at most."""

    usd: float  # of the dearest so far
    rollout_usd: float  # `largest_rollout_usd` when the newest was made
    size: str  # what it asked for, in words


@dataclass(frozen=True, slots=True)
class Spending:
    """What one run has spent in all of its attempts; dollars are None where the price is not known."""

    tokens: Tokens = field(default_factory=Tokens)  # that were billed
    unsure: Tokens = field(default_factory=Tokens)  # at most, of calls whose end was not recorded
    open: Tokens = field(default_factory=Tokens)  # at most, of calls in flight
    usd: float | None = None  # of `tokens`, at the prices at which they were taken
    unsure_usd: float | None = None
    open_usd: float | None = None
    tokens_usd: float | None = None  # of `tokens`, all at the prices of what follows: the newest
    set_aside_usd: float = 0.0  # for the rest of the step that is being taken, and evaluations after it
    largest_step_usd: float = 0.0  # so far
    largest_rollout_usd: float = 0.0  # a step's cost over its rollouts
    largest_sampled_usd: float = 0.0  # of a rollout, without training, where sampling runs ahead of it
    largest_trained_usd: float = 0.0  # of a step, without sampling, there
    evaluations: Mapping[str, EvaluationCost] = field(default_factory=dict)

    @property
    def spent_usd(self) -> float | None:
        """Dollars spent, without the calls in flight; None if the price is not known."""
        return None if self.usd is None else self.usd + (self.unsure_usd or 0.0)

    @property
    def at_most_usd(self) -> float | None:
        """Dollars spent at most, with the calls in flight; None if the price is not known."""
        return None if self.spent_usd is None else self.spent_usd + (self.open_usd or 0.0)

    def learned_at(self, price: Price | None) -> Spending:
        """Return it with what was learned of costs at another price, in the ratio of what all tokens cost."""
        if price is None or not self.tokens_usd:
            return self
        ratio = self.tokens.usd(price) / self.tokens_usd
        evaluations = {
            name: replace(one, usd=ratio * one.usd, rollout_usd=ratio * one.rollout_usd)
            for name, one in self.evaluations.items()
        }
        learned = {name: ratio * getattr(self, name) for name in LEARNED}
        return replace(self, evaluations=evaluations, **learned)

    def after_kill(self) -> Spending:
        """Return it with the calls in flight among those that may have been billed."""
        usd = None if self.unsure_usd is None else self.unsure_usd + (self.open_usd or 0.0)
        return replace(self, unsure=self.unsure + self.open, unsure_usd=usd, open=Tokens(), open_usd=None)


def read_spending(files: RunFiles) -> Spending | None:
    """Read a run's spending; None if it is not billed, or has not begun."""
    record = read_json(files.spend)
    if record is None:
        return None
    try:
        spending = record_of(Spending, record)
        if missing := asdict(spending).keys() - record.keys():
            raise ValueError(f"lacks {min(missing)}")
        if wrong := [number for number in _numbers(asdict(spending)) if not 0 <= number <= MOST]:
            raise ValueError(f"got {quote(wrong[0])}")
        return spending
    except ValueError as error:
        raise DamagedRecordError(
            f"{files.spend}: does not tell what was spent ({error!r}); restore it, or remove it and lower "
            "[budget].usd by what this run was billed"
        ) from error


def columns_of(spending: Spending, *, is_alive: bool) -> dict[str, float | int | None]:
    """Return the columns of a run's row; calls in flight count once nobody waits for them any more."""
    cost_usd, unsure_usd = spending.spent_usd, spending.unsure_usd
    if unsure_usd is not None and not is_alive:
        cost_usd, unsure_usd = spending.at_most_usd, unsure_usd + (spending.open_usd or 0.0)
    tokens = dict(zip(COUNTS, astuple(spending.tokens), strict=True))
    return {"cost_usd": cost_usd, "unsure_usd": unsure_usd, **tokens}


def write_spending(files: RunFiles, spending: Spending) -> None:
    """Replace a run's spend.json; synced each time, as no other record tells what was billed since."""
    write_json(files.spend, asdict(spending))


def note_saved(files: RunFiles, path: str) -> None:
    """Note that a state was saved."""
    append_line(files.states, {"saved": path, "at": utc_now()})


def note_deleted(files: RunFiles, paths: Iterable[str]) -> None:
    """Note that states were deleted."""
    for path in paths:
        append_line(files.states, {"deleted": path, "at": utc_now()})


def saved_states(files: RunFiles) -> tuple[str, ...]:
    """Return the paths of the states that were saved and not deleted, the oldest first."""
    paths: dict[str, None] = {}
    for row in filter(None, map(parse_line, read_lines(files.states))):
        if isinstance(path := row.get("saved"), str):
            paths[path] = None
        elif isinstance(path := row.get("deleted"), str):
            paths.pop(path, None)
    return tuple(paths)


def _numbers(found: Any) -> Iterator[float]:
    """Iterate over the numbers in tables in tables."""
    for value in found.values():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield value
