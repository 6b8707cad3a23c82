"""Which runs a campaign asks for next, by the values of those that ended: rounds and rungs.

Rounds are those of `[decision]`; rungs are those of `[campaign.search]`: who is asked to run how far, and who
goes no further.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from retrain.base.errors import RecordsError, may_pass
from retrain.base.locks.held import hold
from retrain.campaign.forecast import busy_s
from retrain.campaign.rollup import RollUp
from retrain.config.campaign import DecisionSection, SearchSection
from retrain.plan.matrix import Origin, Plan, RunPlan
from retrain.records.decision import (
    ADDED,
    Decision,
    Looks,
    Round,
    append_round,
    begin_design,
    ending_of,
    known_looks,
    read_looks,
    unscored_in,
    value_at_end,
    value_at_step,
    verdict_of,
)
from retrain.records.layout import RunFiles
from retrain.records.lines import append_line, read_records
from retrain.records.manifest import RunEntry
from retrain.records.metrics import seal_of
from retrain.records.run_state import ENDINGS, RunState, end_as_done, read_attempts, read_done, write_done
from retrain.records.rungs import (
    Rung,
    Searched,
    lines_of_search,
    read_proposals,
    write_wait,
)
from retrain.records.spending import read_spending
from retrain.records.text import count_of, parse_duration

if TYPE_CHECKING:
    from retrain.plan.search import Climb

T = TypeVar("T")
TRIED_AGAIN = ENDINGS - {RunState.DONE, RunState.FAILED}  # by a resume


class Rounds:
    """Asks for runs round by round, and keeps what was found in the manifest; for the lock's holder."""

    def __init__(self, plan: Plan, roll_up: RollUp) -> None:
        self._plan = plan
        self._roll_up = roll_up
        self._files = roll_up.files
        self._notice = roll_up.notice
        self._values: dict[str, float | None] = {}  # of finished runs, which do not change
        known = roll_up.manifest.decision
        self._told = {one.condition: one.verdict for one in known.conditions} if known else {}
        self._ended = known.ended if known else ""
        search = plan.campaign.search
        self._rungs = Rungs(plan, search, roll_up) if search is not None else None

    def asked(self, over: Collection[str], lost: Collection[str]) -> frozenset[str]:
        """Return the ids of the runs asked for so far; all of them without `[decision]`.

        `over` are runs that ended without a result and are not tried again for now, `lost` those that no
        resume tries again. A decision goes on without the first, and looks again at one that is repaired; a
        rung stands, so a search decides it without the second only.
        """
        table = self._plan.decision
        if table is None:
            return frozenset(run.run_id for run in self._plan.runs)
        plan, climbed = self._plan, frozenset[str]()
        if self._rungs is not None:
            from retrain.plan.search import fresh_plan  # not at the top: few campaigns search

            climb = self._rungs.climb(lost)
            if climb.winner in ("", plan.reference):
                return frozenset(climb.waits)
            plan, climbed = fresh_plan(plan, climb.winner), climb.wanted
        from retrain.plan.decision import decide  # nor this: imports numpy

        known, done = read_looks(self._files.looks), self._done_of(plan)
        ended = dict.fromkeys(over) | {run.run_id: self._value(run, table.metric) for run in done}
        begun = {run.run_id for run in self._roll_up.entries() if run.attempts}
        is_spent = self._is_spent(table, begun)
        seconds = self._seconds(done) if table.allocate == "auto" else {}
        found = decide(plan, table, ended, begun, is_spent=is_spent, known=known, seconds=seconds)
        self._record(found.rounds, known)
        decision = replace(found.decision, unscored=_unscored(done, table.metric))
        self._roll_up.decided(decision, found.wanted | begun | climbed)
        self._tell(decision)
        return found.wanted

    def _record(self, rounds: Sequence[Round], known: Looks) -> None:
        """Write what was looked at, after what is known."""
        if rounds and not known.design:
            begin_design(self._files.looks, self._plan.design, known.changes)
        for one in rounds:
            append_round(self._files.looks, one)

    def due(self, lost: Collection[str]) -> Mapping[str, float | None] | None:
        """Return the values from which the search's sampler proposes further conditions; None if not yet."""
        return self._rungs.climb(lost).due if self._rungs else None

    @property
    def promoted(self) -> Collection[str]:
        """Runs that waited for the search and go on."""
        return self._rungs.promoted if self._rungs else ()

    def begin_anew(self, changes: Sequence[str]) -> None:
        """Drop what was looked at, if the user has accepted changes; they are told with every verdict."""
        known = known_looks(self._files.looks, self._roll_up.manifest.decision)
        if known.is_lost and not changes:
            self._notice("decision.jsonl was lost: its looks are repeated, at the results as they are now")
        if changes and (known.was_begun or ADDED in changes):
            after = f", after looks at {count_of(known.seeds, 'seed')}" if known.rounds else ""
            told = [f"{change}{after}" for change in changes]
            begin_design(self._files.looks, self._plan.design, (*known.changes, *told))
        if self._plan.decision is None:
            self._roll_up.drop_decision(was_begun=known.was_begun)

    def _done_of(self, plan: Plan) -> list[RunEntry]:
        """Return the finished runs of a plan."""
        compared = {run.run_id for run in plan.runs}
        return [
            run for run in self._roll_up.entries() if run.state == RunState.DONE and run.run_id in compared
        ]

    def _value(self, run: RunEntry, metric: str) -> float | None:
        if run.run_id not in self._values:
            read = partial(value_at_end, result=run.result or {}, metric=metric)
            value = _read(read, self._files.run(run.run_id), self._notice)
            if value is None:
                self._notice(f"{run.run_id} has no {metric}: its seed is left out of the comparison")
            self._values[run.run_id] = value
        return self._values[run.run_id]

    def _is_spent(self, table: DecisionSection, begun: Collection[str]) -> bool:
        """Whether runs, without those of seeds added by hand, have used up the decision's time or money."""
        by_hand = {run.run_id for run in self._plan.runs if run.origin is Origin.ADDED}
        begun = [run_id for run_id in begun if run_id not in by_hand]
        if table.budget_usd is not None and self._cost_usd(begun) >= table.budget_usd:
            return True
        return bool(table.budget) and busy_s(map(self._files.run, begun)) >= parse_duration(table.budget)

    def _cost_usd(self, begun: Collection[str]) -> float:
        found = (read_spending(self._files.run(run_id)) for run_id in begun)
        return math.fsum(one.at_most_usd or 0.0 for one in found if one is not None)

    def _seconds(self, done: Sequence[RunEntry]) -> dict[str, float]:
        """Return how long a finished run of each condition was alive on average."""
        took: dict[str, list[float]] = {}
        for run in done:
            took.setdefault(run.condition, []).append(busy_s([self._files.run(run.run_id)]))
        return {name: mean for name, each in took.items() if (mean := sum(each) / len(each)) > 0}

    def _tell(self, decision: Decision) -> None:
        """Notice verdicts that are new, and the end."""
        for one in decision.conditions:
            if one.verdict not in ("continue", self._told.get(one.condition)):
                self._notice(verdict_of(one, decision))
            self._told[one.condition] = one.verdict
        if decision.ended and not self._ended:
            self._notice(ending_of(decision))
        self._ended = decision.ended


class Rungs:
    """Climbs rung by rung, and keeps what was found in the manifest; for the lock's holder."""

    def __init__(self, plan: Plan, table: SearchSection, roll_up: RollUp) -> None:
        self._plan = plan
        self._table = table
        self._roll_up = roll_up
        self._files = roll_up.files
        self._told = set(lines_of_search(roll_up.manifest.searched))
        self.promoted: Collection[str] = ()  # runs that waited before the last look and go on

    def climb(self, lost: Collection[str]) -> Climb:
        """Return how far the search is; runs that go no further are done then.

        `lost` are runs that ended without a result and that no resume tries again.
        """
        from retrain.plan.proposals import to_come  # not at the top: few campaigns search
        from retrain.plan.search import climb, stages_of

        entries = {run.run_id: run for run in self._roll_up.entries()}

        def value_of(run: RunPlan, step: int) -> tuple[bool, float | None]:
            return self._value(entries[run.run_id], step, lost)

        known = read_records(self._files.rungs, Rung)
        left = to_come(self._table, read_proposals(self._files.proposals))
        found = climb(self._plan, self._table, known, value_of, left)
        for one in found.rungs[len(known) :]:
            append_line(self._files.rungs, asdict(one))
        waits = found.waits.items()
        self.promoted = {run_id for run_id, step in waits if write_wait(self._files.run(run_id).rung, step)}
        self._end(found.over, entries)
        searched = Searched(
            self._table.metric,
            self._plan.reference,
            self._plan.search_seeds,
            found.rungs,
            found.winner,
            tuple(stages_of(self._plan, self._table, left)),
            self._table.sampler,
            len(self._plan.proposed_conditions),
            left,
        )
        begun = {run_id for run_id, entry in entries.items() if entry.attempts}
        self._roll_up.searched(searched, found.wanted | begun)
        for line in lines_of_search(searched):
            self._tell(line)
        return found

    def _tell(self, line: str) -> None:
        """Give a notice once, however often a look finds the same."""
        if line not in self._told:
            self._told.add(line)
            self._roll_up.notice(line)

    def _value(self, run: RunEntry, step: int, lost: Collection[str]) -> tuple[bool, float | None]:
        """Return whether a run is after a step, 0 for its end, and its value there."""
        files, metric = self._files.run(run.run_id), self._table.metric
        if run.state == RunState.RUNNING:
            return False, None
        value: float | None = None
        if step:
            read_there = partial(value_at_step, metric=metric, step=step)
            is_there, value = _read(read_there, files, self._tell) or (False, None)
        elif is_there := run.state == RunState.DONE:
            read_end = partial(value_at_end, result=run.result or {}, metric=metric)
            value = _read(read_end, files, self._tell)
        return is_there or run.run_id in lost, value

    def _end(self, over: Mapping[str, str], entries: Mapping[str, RunEntry]) -> None:
        """Finish runs that go no further, where they are."""
        plans = {run.run_id: run for run in self._plan.runs}
        for run_id, why in over.items():
            if entries[run_id].state in TRIED_AGAIN:
                _finish(plans[run_id], self._files.run(run_id), why)
                self._roll_up.changed(run_id)


def _unscored(done: Sequence[RunEntry], metric: str) -> dict[str, float]:
    """Return each condition's mean share of completions without a score, where there are any."""
    shares: dict[str, list[float]] = {}
    for run in done:
        in_training = run.summary.row.unscored_fraction if run.summary else None
        shares.setdefault(run.condition, []).append(unscored_in(in_training, run.result or {}, metric))
    return {name: math.fsum(each) / len(each) for name, each in shares.items() if any(each)}


def _finish(run: RunPlan, files: RunFiles, why: str) -> None:
    lock = hold(files.lock)
    if lock is None:
        return  # its worker still runs
    with lock:
        attempts = read_attempts(files.attempts)
        if not attempts or read_done(files.done) is not None:
            return
        seal = seal_of(files.metrics)
        write_done(files.done, run.config_hash, {"steps": seal.rows, "dropped": why}, seal)
        end_as_done(files.attempts, attempts[-1], why)


def _read(read: Callable[[RunFiles], T], files: RunFiles, tell: Callable[[str], object]) -> T | None:
    """Return what a run's records say; None, and the problem is told, if they cannot be read.

    Raises RecordsError if that may pass: what is found without a value is final.
    """
    try:
        return read(files)
    except RecordsError as error:
        if may_pass(error):
            raise
        tell(str(error))
        return None
