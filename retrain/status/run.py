"""One run's directory -> one row, from its small files and the ends of its metrics.jsonl."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from retrain.errors import RecordsError
from retrain.plan.pace import PACE_KEYS, pace_of
from retrain.records.files import open_regular
from retrain.records.layout import RunFiles
from retrain.records.lines import Row, number_in, read_tail
from retrain.records.manifest import RunEntry
from retrain.records.metrics import MetricsEnds, read_ends
from retrain.records.run_state import (
    UNREADABLE,
    Done,
    Inspection,
    Progress,
    RunState,
    inspect_run,
    read_progress,
)
from retrain.records.text import plain
from retrain.status.averages import mean, median
from retrain.status.rows import RunStatus

TAIL_ROWS = 5  # enough for a median that one slow step cannot move; more would cost time for every run
KEYS = (
    *PACE_KEYS,
    "mean_reward",
    "eval_reward",
    "permit_wait_s",
    "batch_size",
    "bp_regime",
    "bp_p_star",
    "bp_utilization",
    "throttle_level",
)
NAME_LIMIT = 64
_BAD_ENDS = (RunState.FAILED, RunState.INFRASTRUCTURE, RunState.TIMEOUT, RunState.STALLED, RunState.DIED)


def read_run(files: RunFiles, planned: RunEntry) -> RunStatus:
    """Read one run; files that cannot be read make it `UNREADABLE`, with the reason as its message."""
    try:
        seen = inspect_run(files, planned.config_hash)
        ends = read_ends(files.metrics, TAIL_ROWS, KEYS)
        progress, problem = (None, "") if seen.state == RunState.DONE else progress_of(files.status)
        return row_of(planned, seen, ends, progress, why(files, seen) or problem)
    except RecordsError as error:
        return unreadable(planned, error)


def unreadable(planned: RunEntry, error: RecordsError) -> RunStatus:
    """Give the row of a run whose files cannot be read."""
    nothing = Inspection(RunState.PENDING, (), None)
    return replace(row_of(planned, nothing, MetricsEnds(None, []), None, str(error)), state=UNREADABLE)


def progress_of(status: Path) -> tuple[Progress | None, str]:
    """Read status.json, or say why it cannot be read."""
    # it is not synced, so a power loss may empty it: that costs a step count, not the run
    try:
        return read_progress(status), ""
    except RecordsError as error:
        return None, str(error)


def row_of(
    planned: RunEntry, seen: Inspection, ends: MetricsEnds, progress: Progress | None, message: str
) -> RunStatus:
    """Put together what was read of a run."""
    last = ends.last[-1] if ends.last else {}
    rewards = _numbers(ends.last, "mean_reward")
    step_times = _numbers(ends.last, "step_time_s")
    return RunStatus(
        run_id=plain(planned.run_id, NAME_LIMIT),
        condition=plain(planned.condition, NAME_LIMIT),
        seed=planned.seed if planned.seed >= 0 else None,
        state=str(seen.state),
        phase=_phase(seen.state, progress),
        step=max(progress.step if progress else 0, last.get("step", 0)),
        max_steps=planned.max_steps or (progress.max_steps if progress else None),
        attempt=seen.attempts[-1].number if seen.attempts else 0,
        reward_first=number_in(ends.first, "mean_reward"),
        reward_last=rewards[-1] if rewards else None,
        reward_mean=mean(rewards),
        eval_reward=_eval_reward(ends.last, seen.done),
        step_time_s=median(step_times),
        batch_size=batch if isinstance(batch := last.get("batch_size"), int) else None,
        permit_wait_s=number_in(last, "permit_wait_s"),
        bp_regime=plain(str(last.get("bp_regime", "")), NAME_LIMIT),
        bp_p_star=number_in(last, "bp_p_star"),
        bp_utilization=number_in(last, "bp_utilization"),
        throttle_level=plain(str(last.get("throttle_level", "")), NAME_LIMIT),
        message=plain(message),
        pace=pace_of(ends, seen.attempts),
    )


def _phase(state: RunState, progress: Progress | None) -> str:
    return plain(progress.phase, NAME_LIMIT) if progress and state == RunState.RUNNING else ""


def _eval_reward(rows: Sequence[Row], done: Done | None) -> float | None:
    final = number_in(done.result, "eval_reward") if done else None
    seen = _numbers(rows, "eval_reward")
    return final if final is not None else seen[-1] if seen else None


def why(files: RunFiles, seen: Inspection) -> str:
    """Say why a run ended badly: the last line of its error, or of its output."""
    if seen.state not in _BAD_ENDS:
        return ""
    lines = seen.attempts[-1].message.strip().splitlines()
    return lines[-1] if lines else _last_output(files)


def _last_output(files: RunFiles) -> str:
    try:
        fd = open_regular(files.output_log)
    except FileNotFoundError:
        return ""
    try:
        lines = read_tail(fd, 1)
    finally:
        os.close(fd)
    return lines[-1].decode(errors="replace") if lines else ""


def _numbers(rows: Sequence[Row], key: str) -> list[float]:
    return [value for row in rows if (value := number_in(row, key)) is not None]
