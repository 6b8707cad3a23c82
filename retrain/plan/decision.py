"""When a campaign with `[decision]` has evidence enough: which runs it needs, and what they show.

Seeds are added in rounds: first those that are given, three at least, then one at a time, each to the
reference and to all conditions that are still open. After each round every open condition is looked at.
Rounds that were looked at stand as they were recorded. All others follow from the values of the runs that
ended, so that a campaign that was killed decides as if it had not been.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from retrain.config.campaign import Decide
from retrain.controllers.sequential import Look, SequentialComparison
from retrain.plan.matrix import Plan
from retrain.records.decision import ConditionDecision, Decision, is_higher_better
from retrain.records.looks import Looks, Round

OPEN = "continue"
BUDGET = "budget"
FEWEST_PAIRS = 2  # of values that are compared


@dataclass(frozen=True)
class Progress:
    """What a campaign has asked for and found."""

    decision: Decision
    wanted: frozenset[str]  # ids of the runs asked for so far
    rounds: tuple[Round, ...]  # that were looked at now


def comparison_of(table: Decide, conditions: int) -> SequentialComparison:
    """Return the test that a table asks for, of so many conditions with the reference among them."""
    return SequentialComparison(
        table.max_seeds, table.error, table.smallest_difference, comparisons=conditions - 1
    )


def decide(
    plan: Plan,
    table: Decide,
    ended: Mapping[str, float | None],
    begun: Collection[str],
    *,
    is_spent: bool,
    known: Looks | None = None,
) -> Progress:
    """Return what a campaign needs next and what it has found.

    Args:
        ended: by run id, the value of each run that ended; None if it has none, as it failed.
        begun: runs that were started.
        is_spent: whether the budget is used up, so that no further round begins.
        known: what was looked at before, which stands.
    """
    walk, looked = _Walk(plan, table), []
    for one in known.rounds if known else ():
        walk.take(one)
    while not walk.ended and (asked := walk.next_round()):
        batch = walk.runs_of(asked)
        if is_spent and not batch & set(begun):
            looked.append(walk.close())
            break
        walk.wanted |= batch
        if not batch <= ended.keys():
            break
        looked.append(walk.look(asked, {run_id: ended[run_id] for run_id in sorted(batch)}))
    by_hand = {walk.ids[name, seed] for seed in plan.added_seeds for name in plan.conditions}
    changes = known.changes if known else ()
    again = sorted(run for run, value in walk.values.items() if ended.get(run) not in (None, value))
    decision = replace(walk.decision(), runs=len(walk.wanted | by_hand), changes=changes, again=tuple(again))
    if decision.ended:
        decision = replace(decision, saved_runs=len(plan.runs) - decision.runs)
    return Progress(decision, frozenset(walk.wanted | by_hand), tuple(looked))


class _Walk:
    """Goes through the rounds of a campaign."""

    def __init__(self, plan: Plan, table: Decide) -> None:
        self._plan, self._table = plan, table
        self.ids = {(run.condition, run.seed): run.run_id for run in plan.runs}
        self._seeds = plan.planned_seeds
        self._others = [name for name in plan.conditions if name != plan.reference]
        self._comparison = comparison_of(table, len(plan.conditions))
        self._asked = dict.fromkeys(self._others, 0)
        self._closed: dict[str, ConditionDecision] = {}
        self.values: dict[str, float | None] = {}
        self.wanted: set[str] = set()
        self.ended = ""

    @property
    def _open(self) -> list[str]:
        return [name for name in self._others if name not in self._closed]

    def next_round(self) -> dict[str, int]:
        """Return how many seeds the conditions of the next round will have; none if there is none."""
        first, most = self._plan.first_seeds, len(self._seeds)
        return {name: max(first, self._asked[name] + 1) for name in self._open if self._asked[name] < most}

    def runs_of(self, asked: Mapping[str, int]) -> set[str]:
        """Return the runs that a round adds: seeds of its conditions, and of the reference as many."""
        pairs = {(name, seed) for name, count in asked.items() for seed in self._seeds[:count]}
        pairs |= {(self._plan.reference, seed) for _, seed in pairs}
        return {self.ids[pair] for pair in pairs} - self.wanted

    def take(self, one: Round) -> None:
        """Go through a round as it was recorded."""
        self.wanted |= self.runs_of(one.asked)
        self._asked |= one.asked
        self.values |= one.values
        self._closed |= {found.condition: found for found in one.decided}
        self.ended = one.ended

    def look(self, asked: Mapping[str, int], values: Mapping[str, float | None]) -> Round:
        """Look at all open conditions after a round, and return it."""
        self._asked |= asked
        self.values |= values
        found = [self._found(name, final=self._asked[name] == len(self._seeds)) for name in self._open]
        return self._taken(Round(asked, values, tuple(one.described() for one in found if not one.is_open)))

    def close(self) -> Round:
        """Look a last time after fewer seeds than planned: the error that is left is for this look."""
        found = tuple(self._found(name, final=True).described() for name in self._open)
        return self._taken(Round({}, {}, found, BUDGET))

    def _taken(self, one: Round) -> Round:
        self.take(one)
        return one

    def decision(self) -> Decision:
        """Return what is known now."""
        found = {name: self._closed.get(name) or self._found(name).described() for name in self._others}
        verdicts = {one.verdict for one in found.values()}
        ended = "" if OPEN in verdicts else "seeds" if "undecided" in verdicts else "decided"
        return Decision(
            metric=self._table.metric,
            reference=self._plan.reference,
            error=self._table.error,
            max_seeds=self._table.max_seeds,
            runs=0,
            saved_runs=0,
            ended=self.ended or ended,
            smallest_difference=self._table.smallest_difference,
            conditions=tuple(found.values()),
        )

    def _found(self, name: str, *, final: bool = False) -> _Found:
        """Look at the pairs of a condition's and the reference's values."""
        reference = self._plan.reference
        pairs = [(self._value(name, seed), self._value(reference, seed)) for seed in self._seeds]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        look = None
        if len(known) >= FEWEST_PAIRS:
            look = self._comparison.look(*np.array(known).T, final=final)
        return _Found(name, tuple(known), self._table.metric, final, look)

    def _value(self, name: str, seed: int) -> float | None:
        return self.values.get(self.ids[name, seed])


@dataclass(frozen=True)
class _Found:
    """A look at a condition; described only where it is needed, as an interval takes a hundred looks."""

    condition: str
    pairs: tuple[tuple[float, float], ...]
    metric: str
    final: bool
    look: Look | None  # None: too few pairs

    @property
    def verdict(self) -> str:
        if self.look is None:
            return "undecided" if self.final else OPEN
        opposite = {"better": "worse", "worse": "better"} if is_higher_better(self.metric) is False else {}
        return opposite.get(self.look.verdict, self.look.verdict)

    @property
    def is_open(self) -> bool:
        return self.verdict == OPEN

    def described(self) -> ConditionDecision:
        """Return the verdict with its interval."""
        if self.look is None:
            return ConditionDecision(self.condition, self.verdict, len(self.pairs))
        values, reference = np.array(self.pairs).T
        alone = float(values.var(ddof=1) + reference.var(ddof=1))
        removed = 1 - float((values - reference).var(ddof=1)) / alone if alone > 0 else None
        low, high = (bound if math.isfinite(bound) else None for bound in self.look.interval)
        return ConditionDecision(
            self.condition,
            self.verdict,
            self.look.seeds,
            self.look.difference,
            low,
            high,
            self.look.p_value,
            removed,
        )
