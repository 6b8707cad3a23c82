"""The watchdog of a worker: `run_timeout`, `stall_timeout`, and the grace period after either.

A stall is judged on a monotonic clock by the size of metrics.jsonl and warmup.jsonl, one of which grows with
every step: a `stat` of each, no reading, no timestamps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from retrain.config.schema import Campaign
from retrain.errors import RecordsError
from retrain.plan.matrix import RunPlan
from retrain.records.layout import RunFiles
from retrain.records.run_state import RunState, read_progress

GRACE_S = 30.0  # to save a checkpoint after a timeout, before the worker is killed
LOOKS = 8  # per stall_timeout: a stall is noticed at most an eighth late
PAUSED = "paused"  # the phase in status.json while a worker yields to other load


@dataclass
class Active:
    """A running worker and its timeouts."""

    run: RunPlan
    files: RunFiles
    before: int  # the newest attempt that had ended when this worker began
    patience: Patience
    has_begun: bool = False  # false while it waits in an engine's queue
    cancelled: RunState | None = None
    kill_at_s: float = math.inf

    def due_s(self) -> float:
        """Return when to check this worker again; infinite if only its end matters."""
        return min(self.kill_at_s, self.patience.due_s() if self.cancelled is None else math.inf)


@dataclass
class Patience:
    """How long a worker may run, and how long without a step."""

    files: RunFiles
    timeout_at_s: float
    stall_s: float  # 0: never
    look_at_s: float
    moved_at_s: float
    size: int = field(default=-1)

    @classmethod
    def endless(cls, files: RunFiles) -> Patience:
        """Return one without timeouts: a worker in an engine's queue may wait for days."""
        return cls(files, math.inf, 0.0, math.inf, 0.0)

    @classmethod
    def begin(cls, campaign: Campaign, files: RunFiles, now_s: float) -> Patience:
        """Return a worker's timeouts, from now."""
        timeout_at_s = now_s + campaign.run_timeout if campaign.run_timeout else math.inf
        stall_s = campaign.stall_timeout
        return cls(files, timeout_at_s, stall_s, now_s if stall_s else math.inf, now_s)

    def due_s(self) -> float:
        """Return when to check again."""
        return min(self.timeout_at_s, self.look_at_s)

    def ended_by(self, now_s: float) -> RunState | None:
        """Return which timeout has passed, or None."""
        if now_s >= self.timeout_at_s:
            return RunState.TIMEOUT
        if now_s < self.look_at_s:
            return None
        self.look_at_s = now_s + self.stall_s / LOOKS
        size = self._size()
        if size != self.size:
            self.size, self.moved_at_s = size, now_s
        if now_s - self.moved_at_s < self.stall_s:
            return None
        if self._is_paused():
            self.moved_at_s = now_s
            return None
        return RunState.STALLED

    def _size(self) -> int:
        return sum(map(_size_of, (self.files.metrics, self.files.warmup)))

    def _is_paused(self) -> bool:
        try:
            progress = read_progress(self.files.status)
        except RecordsError:
            return False
        return progress is not None and progress.phase.startswith(PAUSED)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
