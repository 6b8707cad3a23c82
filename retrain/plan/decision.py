"""When a campaign with `[decision]` has evidence enough: which runs it needs, and what they show.

Seeds are added in rounds: first those that are given, three at least, then one at a time, each to the
reference and to all conditions that are still open. After each round every open condition is looked at.
With rungs, its runs go to the first. Once a rung is unlikely to show a difference, the first seeds go on to
the next, which then gets one seed at a time as the first rung did. The looks at a condition at one rung are
at its seeds, in their order, and have a share of the error of their own: what all of them together find by
chance is at most that share, wherever they end, and the shares add up to the error. So it holds for any
correlation of rungs, for any order in which they are looked at, and however soon a rung is given up.
Rounds that were looked at stand as they were recorded. All others follow from the values of the runs that
are there, so that a campaign that was killed decides as if it had not been.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

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
    Unreached,
    is_higher_better,
    value_key,
    verdict_in_words,
)
from retrain.records.windows import AXES, STEPS, Window, amount, read_window, steps_averaged

BUDGET, FAILED, UNREACHED = "budget", "failed", "unreached"
FEWEST_PAIRS = 2  # of values that are compared
LOST = 3  # seeds in a row without a value: runs that fail so often fail at further seeds as well


@dataclass(frozen=True)
class DecisionProgress:
    """What a campaign has asked for and found."""

    decision: Decision
    wanted: frozenset[str]  # ids of the runs asked for so far
    rounds: tuple[Round, ...]  # that were looked at now
    waits: Mapping[str, float] = field(default_factory=dict)  # where each waits; 0: nowhere
    needed: frozenset[str] = frozenset()  # of them, those that are not there yet
    over: Mapping[str, str] = field(default_factory=dict)  # runs that go no further, and why


def decide(
    plan: Plan,
    table: DecisionSection,
    ended: Mapping[str, float | None],
    begun: Collection[str],
    *,
    is_spent: bool,
    before: Looks | None = None,
    seconds: Mapping[str, float] | None = None,
    reached: Mapping[str, float] | None = None,
) -> DecisionProgress:
    """Return what a campaign needs next and what it has found.

    Args:
        ended: by `value_key`, the value of each run that ended or came to a rung; None if it has none.
        begun: of these keys, those of runs that were started, to where they may go.
        is_spent: whether the budget is used up, so that no further round begins.
        before: what was looked at before, which stands.
        seconds: how long a run of each condition takes, where that is known; for `allocate = "auto"`.
        reached: of the keys without a value, how far runs came that ended before there.
    """
    walk, before = Walk(plan, table, seconds or {}, reached or {}), before or Looks({})
    for past in before.rounds:
        walk.take(past)
    walk.reopen(ended)
    looked = tuple(_new_rounds(walk, ended, frozenset(begun), is_spent=is_spent))
    added = [run.run_id for run in plan.runs if run.origin is Origin.ADDED]
    waits, over = walk.ways()
    waits |= dict.fromkeys(added, 0.0)
    needed = {run_id for key, (_, run_id, _) in walk.wanted.items() if key not in ended}
    needed |= {run_id for run_id, rung in waits.items() if not rung}
    averaged = {min(run.max_steps, steps_averaged(run.max_steps)) for run in plan.runs}
    window = read_window(table.per, table.over)
    is_windowed = window != Window() or bool(table.rungs) or table.metric.startswith(HELD_OUT)
    is_mean = not is_windowed and len(averaged) == 1  # else it is none, or runs differ
    decision = Decision(
        metric=table.metric,
        reference=plan.reference,
        error=table.error,
        max_seeds=table.max_seeds,
        runs=len(waits),
        saved_runs=len(plan.runs) - len(waits) if walk.ending else 0,
        saved_share=_saved_share(plan, table, walk) if walk.ending else 0.0,
        ended=walk.ending,
        smallest_difference=table.smallest_difference,
        conditions=walk.described((*before.rounds, *looked)),
        changes=before.changes,
        again=tuple(
            sorted({walk.wanted[k][1] for k, v in walk.values.items() if ended.get(k) not in (None, v)})
        ),
        last_steps=averaged.pop() if is_mean else 0,
        window=window,
        rungs=tuple(table.rungs),
        unreached=walk.unreached(window),
    )
    return DecisionProgress(decision, frozenset(waits), looked, waits, frozenset(needed - over.keys()), over)


def _saved_share(plan: Plan, table: DecisionSection, walk: Walk) -> float:
    """Return the share of all runs that was not needed, and of steps what comes after their windows too."""
    if table.finish:
        return 0.0
    needed, whole = walk.whole_runs, float(len(plan.runs))
    if table.per == STEPS and not table.rungs:
        reach = walk.reach()
        needed = math.fsum(run.max_steps for run in plan.runs if run.run_id in reach)
        whole = math.fsum(run.config.training.max_steps for run in plan.runs)
    return max(0.0, 1 - needed / whole)


def _new_rounds(
    walk: Walk, ended: Mapping[str, float | None], begun: frozenset[str], *, is_spent: bool
) -> Iterator[Round]:
    """Look at each round whose runs have ended, and ask for the runs of the next."""
    while not walk.is_over and (counts := walk.next_round(begun)):
        batch = walk.runs_of(counts)
        if is_spent and not batch.keys() & begun:
            yield Round({}, {}, tuple(finding.described() for finding in walk.close()), BUDGET)
            return
        walk.wanted |= batch
        if not batch.keys() <= ended.keys():
            return
        values = {key: ended[key] for key in sorted(batch)}
        rungs = {name: walk.rung(name) for name in counts} if walk.table.rungs else {}
        decided = tuple(finding.described() for finding in walk.look(counts, values))
        promoted = tuple(name for name, rung in rungs.items() if walk.rung(name) != rung)
        yield Round(counts, values, decided, rungs=rungs, promoted=promoted)


class Walk:
    """Goes through the rounds of a campaign, and knows the verdict on each condition so far.

    A condition's looks are at its own seeds, in their order; when the next one comes changes no boundary. So
    what is found under any allocation is found too when all seeds are run, and the error of the test holds
    although the allocation looks at everything. Only a last look after fewer seeds, when the budget is used
    up, would depend on the allocation, so there is none with `allocate = "auto"`.
    """

    def __init__(
        self,
        plan: Plan,
        table: DecisionSection,
        seconds: Mapping[str, float],
        reached: Mapping[str, float] | None = None,
    ) -> None:
        self._plan, self.table, self._seconds, self._reached = plan, table, seconds, reached or {}
        self._usual_s = float(np.mean(list(seconds.values()))) if seconds else 1.0
        self._rungs = tuple(table.rungs) or (0.0,)
        self._ids = {(run.condition, run.seed): run.run_id for run in plan.runs}
        self._seeds = plan.planned_seeds
        self._comparison = comparison_of(table, len(plan.conditions))
        self.verdicts = dict.fromkeys((name for name in plan.conditions if name != plan.reference), OPEN)
        self._counts = dict.fromkeys(self.verdicts, 0)  # of seeds, at its rung
        self._places = dict.fromkeys(self.verdicts, 0)  # of their rungs
        self.values: dict[str, float | None] = {}
        self.wanted: dict[str, tuple[str, str, float]] = {}  # value keys -> condition, run, rung
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
        if self._lost:
            return UNREACHED if all(map(self._lacks_reach, self._lost)) else FAILED
        return "seeds" if "undecided" in self.verdicts.values() else "decided"

    @property
    def _open(self) -> list[str]:
        return [name for name, verdict in self.verdicts.items() if verdict == OPEN]

    def next_round(self, begun: Collection[str] = ()) -> dict[str, int]:
        """Return how many seeds the conditions of the next round will have; none if there is none."""
        first = self._plan.first_seeds
        counts = {name: max(first, self._counts[name] + 1) for name in self._open}
        if self.table.allocate == "equal" or not all(self._counts.values()):
            return counts
        going = [name for name, count in counts.items() if self._ids[name, self._seeds[count - 1]] in begun]
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
                if self._ids[side, seed] not in self.wanted
            )
            for seed in self._seeds[self._counts[name] :]
        ]
        so_far = self._differences(name, self._counts[name])
        return found_per_cost(self._comparison_of(name)[0], so_far, costs)

    def runs_of(self, counts: Mapping[str, int]) -> dict[str, tuple[str, str, float]]:
        """Return the keys of values that a round adds, of its conditions and the reference.

        Each with its condition, its run and its rung.
        """
        added = {}
        for name, count in counts.items():
            rung = self.rung(name)
            for side, seed in product((name, self._plan.reference), self._seeds[:count]):
                run_id = self._ids[side, seed]
                if (key := value_key(run_id, rung)) not in self.wanted:
                    added[key] = (side, run_id, rung)
        return added

    def rung(self, name: str) -> float:
        """Return the rung at which a condition is compared; 0 for its end."""
        return self._rungs[self._places[name]]

    def take(self, past: Round) -> None:
        """Go through a round as it was recorded."""
        self._places |= {name: self._rungs.index(rung) for name, rung in past.rungs.items()}
        self.wanted |= self.runs_of(past.asked)
        self._go_on(self._lost & past.asked.keys())
        self._counts |= past.asked
        self.values |= past.values
        self._decided(past.decided)
        self._promote(past.promoted)
        self._is_spent = past.ended == BUDGET

    def _promote(self, names: Iterable[str]) -> None:
        for name in names:
            self._places[name] += 1
            self._counts[name] = 0  # fewer seeds may be enough there, and each takes longer

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
            if self.table.allocate == "auto" and not differing and len(closed) < len(findings):
                # the others wait for the error of those that are open
                closed = [finding for finding in closed if finding.verdict == "undecided"]
            self._decided(closed)
            decided += closed
            if not differing:
                self._promote(finding.condition for finding in findings if finding.is_passed)
                return decided

    def _comparison_of(self, name: str) -> tuple[SequentialComparison, Sequence[float]]:
        """Return the comparison of a condition with its share of the error, and later errors.

        Those whose difference is found need none. The shares of the others are equal, or go by their first
        differences.
        """
        left = {other for other, verdict in self.verdicts.items() if verdict not in FOUND} | {name}
        if self.table.allocate == "equal":
            beside = len(self.verdicts) * (len(self._rungs) - 1)  # claims that are never found too
            errors = [self.table.error / (count + beside) for count in range(len(left), 0, -1)]
        else:
            share = self._weights[name] / math.fsum(self._weights[other] for other in left)
            errors = rising_errors(self.table.error, share)
        return replace(self._comparison, error=errors[0], comparisons=1), errors[1:]

    @cached_property
    def _weights(self) -> dict[str, float]:
        first = self._plan.first_seeds
        return weights_of_error({name: self._differences(name, first) for name in self.verdicts})

    def finding(self, name: str, *, is_last: bool = False) -> Finding:
        """Look at a condition."""
        pairs, final = self._pairs(name, self._counts[name]), self._counts[name] == len(self._seeds)
        comparison, later_errors = self._comparison_of(name)
        is_followed = self._places[name] + 1 < len(self._rungs)
        look, verdict, reason = None, OPEN, ""
        if len(pairs) >= FEWEST_PAIRS:
            is_planned = self.table.allocate == "equal" and not self.table.rungs  # whatever data show
            spends = final or (is_last and is_planned)
            look = comparison.look(
                *np.array(pairs).T, final=spends, later_errors=later_errors, has_rungs=bool(self.table.rungs)
            )
            verdict = look.verdict
            if verdict == OPEN and self.table.allocate == "auto" and not comparison.can_find:
                verdict = "no_difference"  # its share of the error is too small
        if verdict == OPEN:
            may_go_on = name not in self._mended and LOST <= self._counts[name] < len(self._seeds)
            lacks = self._lacks(name, self.values)
            if may_go_on and lacks.any(axis=0).all():
                its, reference = (bool(side.all()) for side in lacks)
                whose = (
                    "its" if its else f"{self._plan.reference}'s" if reference else "its or the reference's"
                )
                what = "ended before the end of the window" if self._lacks_reach(name) else "gave no value"
                reason = f"{whose} last {LOST} runs {what}"
            verdict = "undecided" if final or is_last or reason else OPEN
        if is_higher_better(self.table.metric) is False:
            verdict = {"better": "worse", "worse": "better"}.get(verdict, verdict)
        is_passed = is_followed and verdict in ("no_difference", "undecided") and not (is_last or reason)
        verdict = OPEN if is_passed else verdict
        return Finding(name, verdict, pairs, look, self._comparison, reason, self.rung(name), is_passed)

    def _lacks(self, name: str, values: Mapping[str, float | None]) -> NDArray[np.bool_]:
        """Return which runs, of a condition's last seeds, have no value: its own, then the reference's."""
        return np.array([[values.get(key) is None for key in side] for side in self._last_keys(name)])

    def _last_keys(self, name: str) -> list[list[str]]:
        count, both = self._counts[name], (name, self._plan.reference)
        seeds = self._seeds[max(0, count - LOST) : count]
        return [[value_key(self._ids[side, seed], self.rung(name)) for seed in seeds] for side in both]

    def _lacks_reach(self, name: str) -> bool:
        """Whether a condition's last seeds lack values only as runs ended before the window did."""
        keys = [key for side in self._last_keys(name) for key in side if self.values.get(key) is None]
        return bool(keys) and self._reached.keys() >= set(keys)

    def unreached(self, window: Window) -> Unreached | None:
        """Return how far the runs came that ended before the end of the window, or before their rung."""
        keys = self._reached.keys() & self.wanted.keys()
        reached = {self.wanted[key][1]: self._reached[key] for key in keys}
        if not reached:
            return None
        end = min(self.wanted[key][2] or window.end or 0.0 for key in keys)
        return Unreached(len(reached), min(reached.values()), max(reached.values()), end)

    def reach(self) -> dict[str, float]:
        """Return the runs asked for, and to which rung; 0 for their ends."""
        furthest: dict[str, float] = {}
        for _, run_id, rung in self.wanted.values():
            furthest[run_id] = max(furthest.get(run_id, 0.0), rung)
        return furthest

    @property
    def whole_runs(self) -> float:
        """How many whole runs cost as much as those that were asked for."""
        return math.fsum(rung / self._rungs[-1] if rung else 1.0 for rung in self.reach().values())

    def ways(self) -> tuple[dict[str, float], dict[str, str]]:
        """Return the runs asked for with the rung where each waits, 0 for none, and those that stop there.

        A run stops once its condition has its verdict, and the reference's once all have theirs, unless
        `finish` says that it goes on to its end: then it waits until all have theirs. None goes on once the
        budget is used up.
        """
        last, reference, finish = self._rungs[-1], self._plan.reference, self.table.finish
        waits, runs = self.reach(), {run_id: side for side, run_id, _ in self.wanted.values()}
        if not self.table.rungs:
            return waits, {}
        is_settled, ends = self.is_over and not self._lost, set(self.verdicts) | {reference}
        if finish == "reference and winner":
            better = [name for name, verdict in self.verdicts.items() if verdict == "better"]
            sizes = {name: abs(self._differences(name, self._counts[name]).mean()) for name in better}
            best = max(better, key=sizes.__getitem__, default="")
            ends = {best, reference} if is_settled and best else {*better, reference}
        if self._is_spent:
            ends = set()
        closed = {name for name, verdict in self.verdicts.items() if verdict != OPEN} - self._lost
        metric = self.table.metric
        verdicts = {name: verdict_in_words(each, metric, reference) for name, each in self.verdicts.items()}
        verdicts[reference] = "each comparison is over"
        over: dict[str, str] = {}
        for run_id, side in runs.items():
            is_closed = is_settled if side == reference else side in closed
            if is_settled and finish and side in ends:
                waits[run_id] = 0.0
            elif is_closed and not (finish and side in ends):
                rung = amount(waits[run_id])
                at = f"step {rung}" if self.table.per == STEPS else f"{rung} {AXES[self.table.per].unit}"
                over[run_id] = f"stopped at {at}: {verdicts[side]}"
            elif waits[run_id] == last and not finish:
                waits[run_id] = 0.0  # it ends there by itself
        return waits, over

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
            [
                self.values.get(value_key(self._ids[side, seed], self.rung(name)))
                for side in (name, self._plan.reference)
            ]
            for seed in self._seeds[:seeds]
        ]
        return [(a, b) for a, b in pairs if a is not None and b is not None]

    def _differences(self, name: str, seeds: int) -> Floats:
        return np.array([a - b for a, b in self._pairs(name, seeds)])
