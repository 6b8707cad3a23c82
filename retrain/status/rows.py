"""The rows of a campaign and its conditions, and how they are aggregated from the rows of runs.

Every text in them is safe to print (see `records.text`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrain.records.averages import mean, median, sample_std
from retrain.records.manifest import Expectation, Manifest
from retrain.records.run_row import RunRow
from retrain.records.run_state import UNREADABLE, RunState

if TYPE_CHECKING:
    from retrain.plan.estimate.remaining import Remaining

_FINAL = (RunState.DONE, RunState.FAILED, UNREADABLE)  # these take no more steps


@dataclass(frozen=True)
class ConditionStatus:
    """One condition over its seeds."""

    condition: str
    runs: int
    done: int
    running: int
    failed: int  # ended badly: failed, infrastructure, timeout, stalled, died, unreadable
    reward_mean: float | None  # over seeds that are done or running, each seed's mean over its last rows
    reward_std: float | None  # sample standard deviation over those seeds; None below two
    step_time_s: float | None  # median over seeds


@dataclass(frozen=True)
class PermitHolder:
    """A process with an API call in flight."""

    pid: int
    host: str
    label: str
    held_s: float


@dataclass(frozen=True)
class PermitStatus:
    """A campaign's permits at present."""

    permits: int
    holders: tuple[PermitHolder, ...]
    waiting: int
    change: str  # the last automatic change of their number, with its reason; "" if there was none


@dataclass(frozen=True)
class CampaignStatus:
    """One campaign, or one single run."""

    id: str  # name of its directory
    name: str
    state: str  # pending, running, done, failed (ended, not all done), interrupted (work left, none running)
    started_at: str
    ended_at: str  # "" while it is running
    conditions: tuple[ConditionStatus, ...]  # the matrix: these rows ...
    seeds: tuple[int | None, ...]  # ... and these columns
    runs: tuple[RunRow, ...]
    step_time_s: float | None  # median over runs
    steps_done: int
    steps_total: int | None
    eta_s: float | None  # time left, P50; None unless something is running
    permits: PermitStatus | None
    problem: str  # which of the campaign's own files cannot be read, and why
    eta_p90_s: float | None = None  # time left, P90
    expected: Expectation | None = None  # of the whole campaign, and the actual time
    is_supervised: bool = False  # whether its orchestrator lives
    resume_with: str = ""  # the command that resumes it, if work is left and no orchestrator lives

    def run(self, condition: str, seed: int | None) -> RunRow | None:
        """Return the matrix's cell, or None if that run was never planned."""
        return next((r for r in self.runs if (r.condition, r.seed) == (condition, seed)), None)


def summarize(runs: Sequence[RunRow]) -> tuple[ConditionStatus, ...]:
    """Return the row of each condition over its seeds, in order of appearance."""
    by_condition: dict[str, list[RunRow]] = {}
    for run in runs:
        by_condition.setdefault(run.condition, []).append(run)
    return tuple(_condition(name, seeds) for name, seeds in by_condition.items())


def campaign_state(runs: Sequence[RunRow], *, is_supervised: bool) -> str:
    """Return a campaign's state: running if its orchestrator or any worker is alive."""
    states = [run.state for run in runs]
    if is_supervised or RunState.RUNNING in states:
        return "running"
    if all(state == RunState.PENDING for state in states):
        return "pending"
    if all(state == RunState.DONE for state in states):
        return "done"
    work_is_left = any(state in (RunState.PENDING, RunState.INTERRUPTED, RunState.DIED) for state in states)
    return "interrupted" if work_is_left else "failed"


def typical_step_time(runs: Sequence[RunRow]) -> float | None:
    """Median over runs of each one's median, in seconds."""
    times = [run.step_time_s for run in runs if run.step_time_s is not None]
    return median(times)


def time_left(runs: Sequence[RunRow], manifest: Manifest | None, *, is_supervised: bool) -> Remaining | None:
    """Estimate when the last run ends, from the pace so far; None if nothing runs or no pace is known.

    Without an orchestrator, runs that have not begun are left out: nothing would start them.
    """
    if not any(run.state == RunState.RUNNING for run in runs):
        return None
    from retrain.plan.estimate.remaining import RunLeft, remaining
    from retrain.plan.estimate.workload import (  # not at the top: only a live campaign needs them
        ALONE,
        on_cores,
    )

    left = [
        RunLeft(
            run.run_id,
            run.condition,
            max(0, (run.max_steps or 0) - run.step) if _goes_on(run, is_supervised) else 0,
            run.state == RunState.RUNNING,
            run.pace,
        )
        for run in runs
    ]
    if manifest is None:
        return remaining(left, 0)
    crowding = on_cores(manifest.shared_cores) if manifest.shared_cores else ALONE
    return remaining(left, manifest.workers, manifest.stagger_s, crowding)


def _goes_on(run: RunRow, is_supervised: bool) -> bool:
    return run.state not in _FINAL if is_supervised else run.state == RunState.RUNNING


def _condition(name: str, runs: Sequence[RunRow]) -> ConditionStatus:
    # A run that ended early would lower its condition's mean without being worse at the task.
    counted = [r.reward_mean for r in runs if r.state in (RunState.DONE, RunState.RUNNING)]
    rewards = [reward for reward in counted if reward is not None]
    return ConditionStatus(
        condition=name,
        runs=len(runs),
        done=sum(run.is_done for run in runs),
        running=sum(run.state == RunState.RUNNING for run in runs),
        failed=sum(run.ended_badly for run in runs),
        reward_mean=mean(rewards),
        reward_std=sample_std(rewards),
        step_time_s=typical_step_time(runs),
    )
