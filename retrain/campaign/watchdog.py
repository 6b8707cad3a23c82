"""The watchdog of a worker: `run_timeout`, `stall_timeout`, and the grace period after either.

A stall is judged on a monotonic clock by the size of metrics.jsonl and warmup.jsonl, one of which grows with
every step: a `stat` of each, no reading, no timestamps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from retrain.config.campaign import Campaign
from retrain.plan.matrix import RunPlan
from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.run_state import RunState, read_progress

GRACE_S = 30.0  # to save a checkpoint after a timeout, before the worker is killed
LOOKS = 8  # per stall_timeout: a stall is noticed at most an eighth late
PAUSED = "paused"  # the phase in status.json while a worker yields to other load


@dataclass
class Active:
    """A worker that runs, or waits in an engine's queue, perhaps for days."""

    run: RunPlan
    files: RunFiles
    before: int  # the newest attempt that had ended when this worker began
    patience: Patience | None = None  # once it has begun
    cancelled: RunState | None = None
    kill_at_s: float = math.inf

    def due_s(self) -> float:
        """Return when to check this worker again; infinite if only its end matters."""
        if self.patience is None or self.cancelled is not None:
            return self.kill_at_s
        return min(self.kill_at_s, self.patience.due_s())

    def overdue(self, now_s: float) -> RunState | None:
        """Return which timeout of a worker that was not cancelled has passed, or None."""
        return self.patience.ended_by(now_s) if self.patience and self.cancelled is None else None


class Patience:
    """How long a worker may run, and how long without a step."""

    def __init__(self, campaign: Campaign, files: RunFiles, now_s: float) -> None:
        self._files = files
        self._timeout_at_s = now_s + campaign.run_timeout if campaign.run_timeout else math.inf
        self._stall_s = campaign.stall_timeout
        self._look_at_s = now_s if self._stall_s else math.inf
        self._moved_at_s = now_s
        self._size = -1

    def due_s(self) -> float:
        return min(self._timeout_at_s, self._look_at_s)

    def ended_by(self, now_s: float) -> RunState | None:
        """Return which timeout has passed, or None."""
        if now_s >= self._timeout_at_s:
            return RunState.TIMEOUT
        if now_s < self._look_at_s:
            return None
        self._look_at_s = now_s + self._stall_s / LOOKS
        size = sum(map(_size_of, (self._files.metrics, self._files.warmup)))
        if size != self._size:
            self._size, self._moved_at_s = size, now_s
        if now_s - self._moved_at_s < self._stall_s:
            return None
        if self._is_paused():
            self._moved_at_s = now_s
            return None
        return RunState.STALLED

    def _is_paused(self) -> bool:
        progress = readable(read_progress, self._files.status)
        return progress is not None and progress.phase.startswith(PAUSED)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
