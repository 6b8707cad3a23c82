"""What a run's files say of it, in a few figures: from its small files and the ends of its metrics.jsonl."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.errors import RecordsError
from retrain.records.averages import mean, median
from retrain.records.files import open_regular
from retrain.records.layout import RunFiles
from retrain.records.lines import Row, number_in, read_tail
from retrain.records.metrics import MetricsEnds, read_ends
from retrain.records.pace import PACE_KEYS, Pace, pace_of
from retrain.records.run_state import Done, Inspection, Progress, RunState, inspect_run, read_progress

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
_BAD_ENDS = (RunState.FAILED, RunState.INFRASTRUCTURE, RunState.TIMEOUT, RunState.STALLED, RunState.DIED)
_ONLY_RUN_TOML = ["run.toml"]


@dataclass(frozen=True)
class RunSummary:
    """How a run is going, or went. Texts are as the files have them, not made safe to print."""

    state: str  # a RunState
    phase: str = ""  # what a running run was last seen doing
    step: int = 0  # steps that are complete
    max_steps: int | None = None  # as its worker said
    attempt: int = 0  # 0 before the first
    reward_first: float | None = None  # mean reward of the first step
    reward_last: float | None = None
    reward_mean: float | None = None  # over the last rows
    eval_reward: float | None = None
    step_time_s: float | None = None  # median over the last rows
    batch_size: int | None = None  # prompts in the last step
    permit_wait_s: float | None = None  # of the last step
    bp_regime: str = ""
    bp_p_star: float | None = None
    bp_utilization: float | None = None
    throttle_level: str = ""  # what the machine's load allowed in the last step; "" without a throttle
    message: str = ""  # why it ended badly: the last line of the error; or what loggers lack
    pace: Pace | None = None


def summarize_run(files: RunFiles, config_hash: str = "") -> RunSummary:
    """Read a run's directory, which may be missing.

    Args:
        files: the run's.
        config_hash: of the config that the run should have finished; "" accepts any.

    Raises:
        RecordsError: a file is there and cannot be read.
    """
    if _is_untouched(files.directory):
        return RunSummary(RunState.PENDING)
    return summary_of(files, inspect_run(files, config_hash))


def summary_of(files: RunFiles, seen: Inspection) -> RunSummary:
    """Add to a run's state what its rows say.

    Raises:
        RecordsError: a file is there and cannot be read.
    """
    ends = read_ends(files.metrics, TAIL_ROWS, KEYS)
    progress, problem = (None, "") if seen.state == RunState.DONE else progress_of(files.status)
    return put_together(seen, ends, progress, why(files, seen) or problem)


def put_together(seen: Inspection, ends: MetricsEnds, progress: Progress | None, message: str) -> RunSummary:
    """Put together what was read of a run, its rows with `KEYS`."""
    last = ends.last[-1] if ends.last else {}
    rewards = _numbers(ends.last, "mean_reward")
    return RunSummary(
        state=str(seen.state),
        phase=progress.phase if progress and seen.state == RunState.RUNNING else "",
        step=max(progress.step if progress else 0, last.get("step", 0)),
        max_steps=progress.max_steps if progress else None,
        attempt=seen.attempts[-1].number if seen.attempts else 0,
        reward_first=number_in(ends.first, "mean_reward"),
        reward_last=rewards[-1] if rewards else None,
        reward_mean=mean(rewards),
        eval_reward=_eval_reward(ends.last, seen.done),
        step_time_s=median(_numbers(ends.last, "step_time_s")),
        batch_size=batch if isinstance(batch := last.get("batch_size"), int) else None,
        permit_wait_s=number_in(last, "permit_wait_s"),
        bp_regime=str(last.get("bp_regime", "")),
        bp_p_star=number_in(last, "bp_p_star"),
        bp_utilization=number_in(last, "bp_utilization"),
        throttle_level=str(last.get("throttle_level", "")),
        message=message,
        pace=pace_of(ends, seen.attempts),
    )


def progress_of(status: Path) -> tuple[Progress | None, str]:
    """Read status.json, or say why it cannot be read."""
    # it is not synced, so a power loss may empty it: that costs a step count, not the run
    try:
        return read_progress(status), ""
    except RecordsError as error:
        return None, str(error)


def why(files: RunFiles, seen: Inspection) -> str:
    """Return why a run ended badly, the last line of its error or output; or what a finished one lacks."""
    if seen.state == RunState.DONE and seen.attempts:
        return seen.attempts[-1].message
    if seen.state not in _BAD_ENDS:
        return ""
    lines = seen.attempts[-1].message.strip().splitlines()
    return lines[-1] if lines else _last_output(files)


def _is_untouched(directory: Path) -> bool:
    """Tell in one look whether nobody has begun a run: most of a large campaign, for most of its time."""
    try:
        return os.listdir(directory) == _ONLY_RUN_TOML  # noqa: PTH208 (names alone are wanted)
    except OSError:  # missing, or what reading its files will tell of
        return False


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


def _eval_reward(rows: Sequence[Row], done: Done | None) -> float | None:
    final = number_in(done.result, "eval_reward") if done else None
    seen = _numbers(rows, "eval_reward")
    return final if final is not None else seen[-1] if seen else None


def _numbers(rows: Sequence[Row], key: str) -> list[float]:
    return [value for row in rows if (value := number_in(row, key)) is not None]
