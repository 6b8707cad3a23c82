"""Columns of runs, each declared once: `status`, its live view and the report's page show the same texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from retrain.records.run_row import RunRow
from retrain.records.text import MISSING, dollars, format_duration, number


def _rewards(run: RunRow) -> str:
    if run.reward_first is None and run.reward_mean is None:
        return MISSING
    return f"{number(run.reward_first, 2)} -> {number(run.reward_mean, 2)}"


def _back_pressure(run: RunRow) -> str:
    if not run.bp_regime:
        return ""
    return f"{run.bp_regime}, p* {number(run.bp_p_star, 0)}, used {number(run.bp_utilization, 2)}"


@dataclass(frozen=True, slots=True)
class RunColumn:
    """A column of a table of runs."""

    name: str  # `{last}` stands for the steps that rewards are means of
    cell: Callable[[RunRow], str]
    is_right: bool = True
    is_optional: bool = False  # left out if all its cells are empty


STEPS = RunColumn("steps", lambda run: f"{run.step}/{run.max_steps or '?'}")
STEP_TIME = RunColumn("step time", lambda run: format_duration(run.step_time_s))
HELD_OUT = RunColumn("held-out", lambda run: number(run.eval_reward, 2))
REWARDS = RunColumn("reward, step 1 -> {last}", _rewards)
REWARD = RunColumn("reward", lambda run: number(run.reward_mean, 2))
# of each, the first ones stay where there is little room
NARROW_COLUMNS = (  # where those of `STATUS_COLUMNS` up to the reward do not fit
    RunColumn("run", lambda run: run.name, is_right=False),
    RunColumn("state", lambda run: run.state, is_right=False),
    REWARD,
    STEPS,
    HELD_OUT,
    STEP_TIME,
)
STATUS_COLUMNS = (
    RunColumn("condition", lambda run: run.condition, is_right=False),
    RunColumn("seed", lambda run: MISSING if run.seed is None else str(run.seed)),
    RunColumn("state", lambda run: f"{run.state} {run.phase}".rstrip(), is_right=False),
    STEPS,
    REWARDS,
    HELD_OUT,
    STEP_TIME,
    RunColumn("cost", lambda run: "" if run.cost_usd is None else dollars(run.cost_usd), is_optional=True),
    RunColumn("back pressure", _back_pressure, is_right=False, is_optional=True),
    RunColumn("sandbox", lambda run: run.sandbox, is_right=False, is_optional=True),
)
WATCH_COLUMNS = (
    RunColumn("{last}", REWARD.cell),  # beside the curve
    STEPS,
    RunColumn("doing", lambda run: run.phase or run.state, is_right=False),
    RunColumn("batch", lambda run: MISSING if run.batch_size is None else str(run.batch_size)),
    RunColumn("regime", lambda run: run.bp_regime, is_right=False),
    RunColumn("throttle", lambda run: run.throttle_level, is_right=False),
    STEP_TIME,
    RunColumn("calls waited", lambda run: format_duration(run.permit_wait_s) if run.permit_wait_s else ""),
)


def last_steps(runs: Sequence[RunRow]) -> str:
    """Return in words which steps the rewards of runs are means of."""
    counts = sorted({run.reward_steps for run in runs if run.reward_steps})
    if len(counts) > 1:
        return f"last {counts[0]} to {counts[-1]}"
    return f"last {counts[0]}" if counts else "last"


def table_of(
    runs: Sequence[RunRow], columns: Sequence[RunColumn] = STATUS_COLUMNS
) -> tuple[list[str], list[list[str]]]:
    """Return the headers of a table of runs, of which '>' aligns a column right, and its rows."""
    shown = [column for column in columns if not column.is_optional or any(map(column.cell, runs))]
    names = [column.name.format(last=last_steps(runs)) for column in shown]
    headers = [f">{name}" if column.is_right else name for name, column in zip(names, shown, strict=True)]
    return headers, [[column.cell(run) for column in shown] for run in runs]
