"""When a campaign with `[decision]` has evidence enough: which runs it needs, and what they show.

Seeds are added in rounds: first those that are given, three at least, then one at a time, each to the
reference and to all conditions that are still open. After each round every open condition is looked at.
Rounds that were looked at stand as they were recorded. All others follow from the values of the runs that
ended, so that a campaign that was killed decides as if it had not been.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from retrain.base.rollouts import Floats
from retrain.config.schema import DecisionSection
from retrain.control.rules.sequential import (
    SequentialComparison,
    found_per_cost,
    rising_errors,
    weights_of_error,
)
from retrain.plan.decidable import FOUND, Finding, comparison_of
from retrain.plan.matrix import Origin, Plan
from retrain.records.decision import (
    HELD_OUT,
    OPEN,
    ConditionDecision,
    Decision,
    Looks,
    Round,
    is_higher_better,
)
from retrain.records.windows import Window, read_window, steps_averaged

BUDGET, FAILED = "budget", "failed"
FEWEST_PAIRS = 2  # of values that are compared
LOST = 3  # seeds in a row without a value: runs that fail so often fail at further seeds as well


@dataclass(frozen=True)
class DecisionProgress:
    """What a campaign has asked for and found."""

    decision: Decision
    wanted: frozenset[str]  # ids of the runs asked for so far
    rounds: tuple[Round, ...]  # that were looked at now


def decide(
    plan: Plan,
    table: DecisionSection,
    ended: Mapping[str, float | None],
    begun: Collection[str],
    *,
    is_spent: bool,
    before: Looks | None = None,
    seconds: Mapping[str, float] | None = None,
) -> DecisionProgress:
    """Return what a campaign needs next and what it has found.

    Args:
        ended: by run id, the value of each run that ended; None if it has none, as it failed.
        begun: runs that were started.
        is_spent: whether the budget is used up, so that no further round begins.
        before: what was looked at before, which stands.
        seconds: how long a run of each condition takes, where that is known; for `allocate = "auto"`.
    """
    walk, before = Walk(plan, table, seconds or {}), before or Looks({})
    for past in before.rounds:
        walk.take(past)
    walk.reopen(ended)
    looked = tuple(_new_rounds(walk, ended, frozenset(begun), is_spent=is_spent))
    wanted_ids = walk.wanted | {run.run_id for run in plan.runs if run.origin is Origin.ADDED}
    averaged = {min(run.max_steps, steps_averaged(run.max_steps)) for run in plan.runs}
    window = read_window(table.per, table.over)
    is_mean = (
        window == Window() and not table.metric.startswith(HELD_OUT) and len(averaged) == 1
    )  # else it is none, or runs differ
    decision = Decision(
        metric=table.metric,
        reference=plan.reference,
        error=table.error,
        max_seeds=table.max_seeds,
        runs=len(wanted_ids),
        saved_runs=len(plan.runs) - len(wanted_ids) if walk.ending else 0,
        ended=walk.ending,
        smallest_difference=table.smallest_difference,
        conditions=walk.described((*before.rounds, *looked)),
        changes=before.changes,
        again=tuple(sorted(r for r, value in walk.values.items() if ended.get(r) not in (None, value))),
        last_steps=averaged.pop() if is_mean else 0,
        window=window,
    )
    return DecisionProgress(decision, frozenset(wanted_ids), looked)


def _new_rounds(
    walk: Walk, ended: Mapping[str, float | None], begun: frozenset[str], *, is_spent: bool
) -> Iterator[Round]:
    """Look at each round whose runs have ended, and ask for the runs of the next."""
    while not walk.is_over and (counts := walk.next_round(begun)):
        batch = walk.runs_of(counts)
        if is_spent and not batch & begun:
            yield Round({}, {}, tuple(finding.described() for finding in walk.close()), BUDGET)
            return
        walk.wanted |= batch
        if not batch <= ended.keys():
            return
        values = {run_id: ended[run_id] for run_id in sorted(batch)}
        yield Round(counts, values, tuple(finding.described() for finding in walk.look(counts, values)))


class Walk:
    """Goes through the rounds of a campaign, and knows the verdict on each condition so far.

    A condition's looks are at its own seeds, in their order; when the next one comes changes no boundary. So
    what is found under any allocation is found too when all seeds are run, and the error of the test holds
    although the allocation looks at everything. Only a last look after fewer seeds, when the budget is used
    up, would depend on the allocation, so there is none with `allocate = "auto"`.
    """

    def __init__(self, plan: Plan, table: DecisionSection, seconds: Mapping[str, float]) -> None:
        self._plan, self._table, self._seconds = plan, table, seconds
        self._usual_s = float(np.mean(list(seconds.values()))) if seconds else 1.0
        self.ids = {(run.condition, run.seed): run.run_id for run in plan.runs}
        self._seeds = plan.planned_seeds
        self._comparison = comparison_of(table, len(plan.conditions))
        self.verdicts = dict.fromkeys((name for name in plan.conditions if name != plan.reference), OPEN)
        self._counts = dict.fromkeys(self.verdicts, 0)
        self.values: dict[str, float | None] = {}
        self.wanted: set[str] = set()
        self._lost: set[str] = set()  # conditions that get no more seeds, as their last runs gave no value
        self._mended: set[str] = set()  # those that were lost and will have further seeds
        self._is_spent = False

    @property
    def is_over(self) -> bool:
        return self._is_spent or not self._open

    @property
    def ending(self) -> str:
        """Why no seeds are added any more; "" while they are."""
        if self._is_spent:
            return BUDGET
        if self._open:
            return ""
        return FAILED if self._lost else "seeds" if "undecided" in self.verdicts.values() else "decided"

    @property
    def _open(self) -> list[str]:
        return [name for name, verdict in self.verdicts.items() if verdict == OPEN]

    def next_round(self, begun: Collection[str] = ()) -> dict[str, int]:
        """Return how many seeds the conditions of the next round will have; none if there is none."""
        first = self._plan.first_seeds
        counts = {name: max(first, self._counts[name] + 1) for name in self._open}
        if self._table.allocate == "equal" or not all(self._counts.values()):
            return counts
        going = [name for name, count in counts.items() if self.ids[name, self._seeds[count - 1]] in begun]
        if going:
            return {name: counts[name] for name in going}  # as before a kill
        batch: dict[str, int] = {}
        likely = [name for name in counts if self.finding(name).verdict == OPEN]  # the others wait
        for name in sorted(likely, key=self._promise, reverse=True):
            if len(self.runs_of(batch)) < self._plan.workers:
                batch[name] = counts[name]
        return batch

    def _promise(self, name: str) -> float:
        """Return the chance of finding a condition to differ, per second that it takes."""
        costs = [
            sum(
                self._seconds.get(side, self._usual_s)
                for side in (name, self._plan.reference)
                if self.ids[side, seed] not in self.wanted
            )
            for seed in self._seeds[self._counts[name] :]
        ]
        so_far = self._differences(name, self._counts[name])
        return found_per_cost(self._comparison_of(name)[0], so_far, costs)

    def runs_of(self, counts: Mapping[str, int]) -> set[str]:
        """Return the runs that a round adds: seeds of its conditions, and of the reference as many."""
        pairs = {(name, seed) for name, count in counts.items() for seed in self._seeds[:count]}
        pairs |= {(self._plan.reference, seed) for _, seed in pairs}
        return {self.ids[pair] for pair in pairs} - self.wanted

    def take(self, past: Round) -> None:
        """Go through a round as it was recorded."""
        self.wanted |= self.runs_of(past.asked)
        self._go_on(self._lost & past.asked.keys())
        self._counts |= past.asked
        self.values |= past.values
        self._decided(past.decided)
        self._is_spent = past.ended == BUDGET

    def reopen(self, ended: Mapping[str, float | None]) -> None:
        """Go on with conditions whose runs gave no value, once a pair of them was repaired: at further seeds.

        What was looked at without a value stays left out: the look may have found other conditions.
        """
        if not self._is_spent:
            self._go_on({name for name in self._lost if not self._lacks(name, ended).any(axis=0).all()})

    def _go_on(self, mended: set[str]) -> None:
        self._lost -= mended
        self._mended |= mended
        self.verdicts |= dict.fromkeys(mended, OPEN)

    def _decided(self, closed: Sequence[ConditionDecision | Finding]) -> None:
        self.verdicts |= {finding.condition: finding.verdict for finding in closed}
        self._lost |= {finding.condition for finding in closed if finding.reason}

    def look(self, counts: Mapping[str, int], values: Mapping[str, float | None]) -> list[Finding]:
        """Look at all open conditions after a round, and return those that are decided now.

        By Holm's procedure (1979): once a difference is found, the others share its error. Of conditions
        that equal the reference, the first to be found has at most the share that it has among these alone,
        as shares only grow. What it finds with one share it finds with every larger one (`later_errors`): so
        it errs at most with that share, and these add up to the error. Maurer and Bretz (2013,
        doi:10.1080/19466315.2013.807748) ask this of group-sequential tests that pass on their error.
        """
        self._counts |= counts
        self.values |= values
        self._mended -= counts.keys()
        return self._decide(is_last=False)

    def close(self) -> list[Finding]:
        """Look a last time, as the budget is used up: the error that is left is for this look."""
        self._is_spent = True
        return self._decide(is_last=True)

    def _decide(self, *, is_last: bool) -> list[Finding]:
        decided: list[Finding] = []
        while True:
            findings = [self.finding(name, is_last=is_last) for name in self._open]
            differing = [finding for finding in findings if finding.verdict in FOUND]
            closed = differing or [finding for finding in findings if finding.verdict != OPEN]
            if self._table.allocate == "auto" and not differing and len(closed) < len(findings):
                # the others wait for the error of those that are open
                closed = [finding for finding in closed if finding.verdict == "undecided"]
            self._decided(closed)
            decided += closed
            if not differing:
                return decided

    def _comparison_of(self, name: str) -> tuple[SequentialComparison, Sequence[float]]:
        """Return the comparison of a condition with its share of the error, and later errors.

        Those found to differ need none. The shares of the others are equal, or go by their first differences.
        """
        left = {other for other, verdict in self.verdicts.items() if verdict not in FOUND} | {name}
        if self._table.allocate == "equal":
            errors = [self._table.error / count for count in range(len(left), 0, -1)]
        else:
            share = self._weights[name] / math.fsum(self._weights[other] for other in left)
            errors = rising_errors(self._table.error, share)
        return replace(self._comparison, error=errors[0], comparisons=1), errors[1:]

    @cached_property
    def _weights(self) -> dict[str, float]:
        first = self._plan.first_seeds
        return weights_of_error({name: self._differences(name, first) for name in self.verdicts})

    def finding(self, name: str, *, is_last: bool = False) -> Finding:
        """Look at a condition."""
        pairs, final = self._pairs(name, self._counts[name]), self._counts[name] == len(self._seeds)
        comparison, later_errors = self._comparison_of(name)
        look, verdict, reason = None, OPEN, ""
        if len(pairs) >= FEWEST_PAIRS:
            spends = final or (is_last and self._table.allocate == "equal")
            look = comparison.look(*np.array(pairs).T, final=spends, later_errors=later_errors)
            verdict = look.verdict
            if verdict == OPEN and self._table.allocate == "auto" and not comparison.can_find:
                verdict = "no_difference"  # its share of the error is too small
        if verdict == OPEN:
            may_go_on = name not in self._mended and LOST <= self._counts[name] < len(self._seeds)
            lacks = self._lacks(name, self.values)
            if may_go_on and lacks.any(axis=0).all():
                its, reference = (bool(side.all()) for side in lacks)
                whose = (
                    "its" if its else f"{self._plan.reference}'s" if reference else "its or the reference's"
                )
                reason = f"{whose} last {LOST} runs gave no value"
            verdict = "undecided" if final or is_last or reason else OPEN
        if is_higher_better(self._table.metric) is False:
            verdict = {"better": "worse", "worse": "better"}.get(verdict, verdict)
        return Finding(name, verdict, pairs, look, self._comparison, reason)

    def _lacks(self, name: str, values: Mapping[str, float | None]) -> NDArray[np.bool_]:
        """Return which runs, of a condition's last seeds, have no value: its own, then the reference's."""
        count, both = self._counts[name], (name, self._plan.reference)
        seeds = self._seeds[max(0, count - LOST) : count]
        return np.array([[values.get(self.ids[side, seed]) is None for seed in seeds] for side in both])

    def described(self, rounds: Sequence[Round]) -> tuple[ConditionDecision, ...]:
        """Return what was found of each condition: where rounds decided it, else as it looks now."""
        decided = {finding.condition: finding for past in rounds for finding in past.decided}
        return tuple(
            self.finding(name).described() if verdict == OPEN else decided[name]
            for name, verdict in self.verdicts.items()
        )

    def _pairs(self, name: str, seeds: int) -> list[tuple[float, float]]:
        """Return the values of a condition and of the reference at so many seeds, where both have one."""
        pairs = [
            [self.values.get(self.ids[side, seed]) for side in (name, self._plan.reference)]
            for seed in self._seeds[:seeds]
        ]
        return [(a, b) for a, b in pairs if a is not None and b is not None]

    def _differences(self, name: str, seeds: int) -> Floats:
        return np.array([a - b for a, b in self._pairs(name, seeds)])
