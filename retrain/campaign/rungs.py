"""Rungs of a campaign with `[campaign.search]`: who is asked to run how far, and who goes no further."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from retrain.campaign.rollup import RollUp
from retrain.config.campaign import Search
from retrain.locks.held import hold
from retrain.plan.matrix import Plan, RunPlan
from retrain.records.decision import final_value, value_at
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.manifest import RunEntry
from retrain.records.metrics import seal_of
from retrain.records.run_state import RunState, end_as_done, read_attempts, read_done, write_done
from retrain.records.rungs import (
    Searched,
    append_rung,
    lines_of_search,
    read_proposals,
    read_rungs,
    write_wait,
)

if TYPE_CHECKING:
    from retrain.plan.search import Climb


class Rungs:
    """Climbs rung by rung, and keeps what was found in the manifest; for the lock's holder."""

    def __init__(
        self,
        plan: Plan,
        table: Search,
        roll_up: RollUp,
        files_of: Callable[[str], RunFiles],
        files: CampaignFiles,
        notice: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._table = table
        self._roll_up = roll_up
        self._files_of = files_of
        self._rungs = files.rungs
        self._proposals = files.proposals
        self._notice = notice
        self._told = set(lines_of_search(roll_up.manifest.searched))
        self.promoted: Collection[str] = ()  # runs that waited before the last look and go on

    def climb(self, over: Collection[str]) -> Climb:
        """Return how far the search is; runs that go no further are done then.

        `over` are runs that ended without a result and are not tried again.
        """
        from retrain.plan.proposals import to_come  # not at the top: few campaigns search
        from retrain.plan.search import climb, stages_of

        entries = {run.run_id: run for run in self._roll_up.entries()}

        def value_of(run: RunPlan, step: int) -> tuple[bool, float | None]:
            return self._value(entries[run.run_id], step, over)

        known, left = read_rungs(self._rungs), to_come(self._table, read_proposals(self._proposals))
        found = climb(self._plan, self._table, known, value_of, left)
        for one in found.rungs[len(known) :]:
            append_rung(self._rungs, one)
        waits = found.waits.items()
        self.promoted = {run_id for run_id, step in waits if write_wait(self._files_of(run_id).rung, step)}
        self._end(found.over, entries)
        searched = Searched(
            self._table.metric,
            self._plan.reference,
            self._plan.search_seeds,
            found.rungs,
            found.winner,
            tuple(stages_of(self._plan, self._table, left)),
            self._table.sampler,
            self._plan.proposed,
            left,
        )
        begun = {run_id for run_id, entry in entries.items() if entry.attempts}
        self._roll_up.searched(searched, found.wanted | begun)
        for line in lines_of_search(searched):
            if line not in self._told:
                self._told.add(line)
                self._notice(line)
        return found

    def _value(self, run: RunEntry, step: int, over: Collection[str]) -> tuple[bool, float | None]:
        """Return whether a run is after a step, 0 for its end, and its value there."""
        files, metric = self._files_of(run.run_id), self._table.metric
        if run.state == RunState.RUNNING:
            return False, None
        if step:
            is_there, value = value_at(files, metric, step)
        else:
            is_there = run.state == RunState.DONE
            value = final_value(files, run.result or {}, metric) if is_there else None
        return is_there or run.run_id in over, value

    def _end(self, over: Mapping[str, str], entries: Mapping[str, RunEntry]) -> None:
        """Finish runs that go no further, where they are."""
        plans = {run.run_id: run for run in self._plan.runs}
        for run_id, why in over.items():
            if entries[run_id].state in (RunState.INTERRUPTED, RunState.DIED):
                _finish(plans[run_id], self._files_of(run_id), why)
                self._roll_up.changed(run_id)


def _finish(run: RunPlan, files: RunFiles, why: str) -> None:
    lock, attempts = hold(files.lock), read_attempts(files.attempts)
    if lock is None or not attempts:
        return  # its worker still runs
    with lock:
        if read_done(files.done) is not None:
            return
        last, seal = attempts[-1], seal_of(files.metrics)
        write_done(files.done, run.config_hash, {"steps": seal.rows, "dropped": why}, seal)
        end_as_done(files.attempts, last, why)
