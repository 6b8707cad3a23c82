"""The forecast: how long a campaign is expected to take, and, at its end, how long it took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from retrain.base.clock import seconds_between
from retrain.base.errors import RecordsError
from retrain.control.machine import cpu_capacity
from retrain.plan.estimate.history import learn_from
from retrain.plan.estimate.remaining import remaining, without_ends
from retrain.plan.estimate.wall_time import crowding_of, learned_for, wall_time
from retrain.plan.matrix import Plan
from retrain.records.layout import CALIBRATIONS, CampaignFiles, RunFiles, find_campaigns, name_of
from retrain.records.lines import parse_line, read_lines
from retrain.records.manifest import Expectation, Manifest
from retrain.records.run_row import read_run
from retrain.records.run_state import RunState, read_attempts
from retrain.records.text import about, count_of

FIRST_UPDATE_S = 1.0
UPDATE_EVERY = 1.5  # times the time of the update before, so that the cost stays small
ENOUGH_STEPS = 30  # of each running run, or the share below of its steps: fewer look steadier than they are
ENOUGH_SHARE = 0.05
LATEST_SHARE = 0.25  # of all steps: until then, a forecast waits for a step of each condition
FEW_RUNS = 2  # of each condition, in earlier campaigns


class Forecaster:
    """Forecasts one session of a campaign, from earlier campaigns of its name or from its own first steps."""

    def __init__(
        self, plan: Plan, files: CampaignFiles, known: Manifest, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin; `known` is the present manifest: a resumed campaign keeps its first forecast."""
        self._plan = plan
        self._files = files
        self._expected = known.expected
        self._is_new = plan.decision is None and all(run.attempts == 0 for run in known.runs)
        self._was_over = all(run.state == RunState.DONE for run in known.runs)
        self._clock = clock
        self._began_s = clock()
        self._asked_history = False
        self._next_update_s = FIRST_UPDATE_S

    def update(self) -> Expectation | None:
        """Return the forecast once, as soon as there is one; damaged records never end a campaign for it."""
        elapsed_s = self._clock() - self._began_s
        if self._expected is not None or not self._is_new:
            return None
        with contextlib.suppress(RecordsError, ValueError, ArithmeticError):
            if not self._asked_history:
                self._asked_history = True
                self._expected = self._from_history()
            elif elapsed_s >= self._next_update_s:
                self._next_update_s = UPDATE_EVERY * elapsed_s
                self._expected = self._from_steps(elapsed_s)
        return self._expected

    def ended(self) -> Expectation | None:
        """Return the forecast with the actual time, now that every run is done; None without a forecast."""
        if self._expected is None or (self._was_over and self._expected.actual_s is not None):
            return self._expected
        own_s = self._clock() - self._began_s
        with contextlib.suppress(RecordsError):  # then the actual time stays unknown
            if not self._is_new:  # pauses of a stopped campaign do not count
                own_s = busy_s(self._files.run(run.run_id) for run in self._plan.runs)
            return replace(self._expected, actual_s=own_s)
        return self._expected

    def _from_history(self) -> Expectation | None:
        directory = self._files.directory
        campaigns = _named(directory.name, find_campaigns(directory.parent))
        earlier = [path for path in campaigns if path.name != directory.name]
        if not earlier:  # the pilots of calibrations of this file, or of the file that one wrote
            name = directory.name.replace(".calibrated", "")
            calibrations = _named(name, sorted((directory.parent / CALIBRATIONS).glob("*")))
            earlier = [pilot for path in calibrations for pilot in path.glob("pilot-*")]
        history = learn_from(earlier, self._plan.conditions, FEW_RUNS)
        learned = learned_for(self._plan, history, cpu_capacity())
        if learned is None or any(one.match == "other settings" for one in learned.conditions.values()):
            return None
        if self._plan.decision and self._plan.decision.max_questions is not None:
            from retrain.plan.designs import further_questions  # few files have the key

            if further := further_questions(self._plan, directory.parent):
                learned = replace(learned, further=further.added(further.forecast, self._plan))
        time = wall_time(self._plan, learned, cpu_capacity())
        made_from = count_of(len(history.runs), "earlier run")
        if time.slowest_p50_s is not None:
            made_from += (
                f", with unlimited permits; P50 is {about(time.slowest_p50_s)} if they stay as they are"
            )
        return Expectation(time.p50_s, time.p90_s, 0.0, made_from)

    def _from_steps(self, elapsed_s: float) -> Expectation | None:
        rows = [read_run(run.planned, self._files.run(run.run_id)).row for run in self._plan.runs]
        active = [row for row in rows if row.state == RunState.RUNNING]
        for row in active:
            if row.pace is None:
                return None
            enough = min(ENOUGH_STEPS, max(2, ENOUGH_SHARE * (row.pace.steps + row.steps_left)))
            if (row.pace.late_steps or row.pace.steps) < enough:
                return None
        steps = sum(row.step + row.steps_left for row in rows)
        is_early = sum(row.step for row in rows) < LATEST_SHARE * steps
        without_step = {row.condition for row in rows} - {row.condition for row in rows if row.pace}
        if not active or (is_early and without_step):  # their steps may cost more or less
            return None
        crowding = crowding_of(self._plan, cpu_capacity())
        left = remaining(rows, self._plan.workers, self._plan.campaign.stagger_seconds, crowding)
        if left is None:
            return None
        made_from = f"its first steps{without_ends(rows)}"
        return Expectation(elapsed_s + left.p50_s, elapsed_s + left.p90_s, elapsed_s, made_from)


def busy_s(runs: Iterable[RunFiles]) -> float:
    """Return the seconds in which any of these runs was alive.

    An attempt whose end nobody recorded, as it was killed with its orchestrator, lasted until its last row.
    """
    spans: list[tuple[str, str]] = []
    for files in runs:
        attempts = read_attempts(files.attempts)
        last: dict[int, str] = {}  # when each attempt wrote its last row, also one that was repeated later
        if not all(attempt.ended_at for attempt in attempts):
            rows = (parse_line(line) or {} for line in read_lines(files.metrics))
            last = {row.get("attempt", 0): str(row.get("timestamp", "")) for row in rows}
        spans += [
            (attempt.started_at, attempt.ended_at or last.get(attempt.number, "")) for attempt in attempts
        ]
    return union_s(spans)


def _named(campaign: str, directories: Iterable[Path]) -> list[Path]:
    """Return the directories of earlier campaigns, or calibrations, of the same name."""
    return [path for path in directories if name_of(path.name) == name_of(campaign)]


def union_s(spans: Iterable[tuple[str, str]]) -> float:
    """Return the seconds that spans of timestamps cover together."""
    total, until = 0.0, ""
    for begin, end in sorted(spans):
        begin = max(begin, until)
        if end > begin:
            total += seconds_between(begin, end) or 0.0
            until = end
    return total


def said(expected: Expectation) -> str:
    """Return the forecast in words."""
    return f"{about(expected.p50_s)} expected, P90 {about(expected.p90_s)} (from {expected.made_from})"
