"""Rows of runs -> rows of conditions, a campaign's state and its ETA. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from retrain.records.averages import mean, median, sample_std
from retrain.records.manifest import Manifest
from retrain.records.run_row import RunRow
from retrain.records.run_state import UNREADABLE, RunState
from retrain.status.rows import ConditionStatus

if TYPE_CHECKING:
    from retrain.plan.estimate.remaining import Remaining

_UNTOUCHED = (RunState.PENDING, RunState.RUNNING, RunState.DONE, RunState.INTERRUPTED)
_FINAL = (RunState.DONE, RunState.FAILED, UNREADABLE)  # nobody will take more steps of these


def summarize(runs: Sequence[RunRow]) -> tuple[ConditionStatus, ...]:
    """Sum up each condition over its seeds, in the order in which conditions appear."""
    by_condition: dict[str, list[RunRow]] = {}
    for run in runs:
        by_condition.setdefault(run.condition, []).append(run)
    return tuple(_condition(name, seeds) for name, seeds in by_condition.items())


def campaign_state(runs: Sequence[RunRow], *, is_supervised: bool) -> str:
    """Tell a campaign's state: running if its orchestrator or any worker lives."""
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

    Without a supervisor, runs that have not begun are left out: nobody would start them.
    """
    if not any(run.state == RunState.RUNNING for run in runs):
        return None
    from retrain.plan.crowding import ALONE, on_cores  # not at the top: only a live campaign needs them
    from retrain.plan.estimate.remaining import RunLeft, remaining

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
    # A run that broke off early would drag its condition's mean without being worse at the task.
    counted = [r.reward_mean for r in runs if r.state in (RunState.DONE, RunState.RUNNING)]
    rewards = [reward for reward in counted if reward is not None]
    return ConditionStatus(
        condition=name,
        runs=len(runs),
        done=sum(run.state == RunState.DONE for run in runs),
        running=sum(run.state == RunState.RUNNING for run in runs),
        failed=sum(run.state not in _UNTOUCHED for run in runs),
        reward_mean=mean(rewards),
        reward_std=sample_std(rewards),
        step_time_s=typical_step_time(runs),
    )
