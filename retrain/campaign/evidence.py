"""Rounds of a campaign with `[decision]`: which runs are asked for, by the values of those that ended."""

from __future__ import annotations

from collections.abc import Callable, Collection

from retrain.campaign.forecast import union_s
from retrain.campaign.rollup import RollUp
from retrain.errors import RecordsError
from retrain.plan.matrix import Plan
from retrain.records.decision import Decision, ending_of, final_value, verdict_of
from retrain.records.layout import RunFiles
from retrain.records.manifest import RunEntry
from retrain.records.run_state import RunState, read_attempts
from retrain.records.text import parse_duration


class Rounds:
    """Asks for runs round by round, and keeps what was found in the manifest; for the lock's holder."""

    def __init__(
        self, plan: Plan, roll_up: RollUp, files_of: Callable[[str], RunFiles], notice: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._roll_up = roll_up
        self._files_of = files_of
        self._notice = notice
        self._values: dict[str, float | None] = {}  # of finished runs, which do not change
        known = roll_up.manifest.decision
        self._told = {one.condition: one.verdict for one in known.conditions} if known else {}
        self._ended = known.ended if known else ""

    def asked(self, over: Collection[str]) -> frozenset[str]:
        """Return the ids of the runs asked for so far; all of them without `[decision]`.

        `over` are runs that ended without a result and are not tried again.
        """
        table = self._plan.decision
        if table is None:
            return frozenset(run.run_id for run in self._plan.runs)
        from retrain.plan.decision import decide  # not at the top: imports numpy

        entries = self._roll_up.entries()
        ended = {run.run_id: self._value(run, table.metric) for run in entries if run.state == RunState.DONE}
        ended |= {run_id: None for run_id in over if run_id not in ended}
        begun = {run.run_id for run in entries if run.attempts}
        by_hand = {run.run_id for run in self._plan.runs if run.seed in self._plan.added_seeds}
        is_spent = bool(table.budget) and self._busy_s(begun - by_hand) >= parse_duration(table.budget)
        found = decide(self._plan, table, ended, begun, is_spent=is_spent)
        self._roll_up.decided(found.decision, found.wanted | begun)
        self._tell(found.decision)
        return found.wanted

    def _value(self, run: RunEntry, metric: str) -> float | None:
        if run.run_id not in self._values:
            try:
                value = final_value(self._files_of(run.run_id), run.result or {}, metric)
            except RecordsError as error:
                self._notice(str(error))
                value = None
            if value is None:
                self._notice(f"{run.run_id} has no {metric}: its seed is left out of the comparison")
            self._values[run.run_id] = value
        return self._values[run.run_id]

    def _busy_s(self, begun: Collection[str]) -> float:
        attempts = (one for run_id in begun for one in read_attempts(self._files_of(run_id).attempts))
        return union_s((one.started_at, one.ended_at) for one in attempts if one.ended_at)

    def _tell(self, decision: Decision) -> None:
        """Notice verdicts that are new, and the end."""
        for one in decision.conditions:
            if one.verdict not in ("continue", self._told.get(one.condition)):
                self._notice(verdict_of(one, decision))
            self._told[one.condition] = one.verdict
        if decision.ended and not self._ended:
            self._notice(ending_of(decision))
        self._ended = decision.ended
