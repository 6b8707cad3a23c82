"""What a calibration comes out with: plain data, shown as tables or printed as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from retrain.calibrate.advice import Advice, Memory
from retrain.calibrate.facts import BatchFound, Lengths, StepSplit, WorkersMeasured
from retrain.plan.estimate.wall_time import WallTime


@dataclass(frozen=True)
class Scaling:
    """Throughput across workers, and the law fitted to it."""

    measured: tuple[WorkersMeasured, ...]
    sigma: float | None
    kappa: float | None
    p_star: float | None  # None: no optimum found
    note: str  # why nothing was fitted, or what to bear in mind


@dataclass(frozen=True)
class Disk:
    """Bytes that a whole campaign would write, and what is free."""

    checkpoints: float
    records: float
    free: int


@dataclass(frozen=True)
class Calibration:
    """Everything that was found."""

    source: str
    directory: str  # of the trials
    pilot: str  # directory of its campaign; "" if it did not begin
    is_complete: bool  # False: stopped, or out of time
    was_interrupted: bool
    tried: tuple[str, ...]
    left_out: tuple[str, ...]
    seconds: float
    steps: tuple[StepSplit, ...]
    lengths: tuple[Lengths, ...]  # of each condition
    batch: BatchFound | None
    scaling: Scaling | None
    memory: Memory
    out_of_memory_at: int | None  # prompts at a time that did not fit the pilot's device
    disk: Disk | None
    advice: tuple[Advice, ...]
    before: WallTime | None
    after: WallTime | None
    written: str = ""
