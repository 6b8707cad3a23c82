"""Measures a step: the time of its parts, and what limited each phase on this hardware."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from retrain.backends import Backend
from retrain.backends.metering import SamplingWork, Work
from retrain.config.schema import BackPressureSection
from retrain.control.rules import require
from retrain.records.row_parts import ApiPause
from retrain.records.step_row import RooflineSummary, Timing
from retrain.trainer.journal import Journal

ATTAINED_LEAST = 0.3  # of a peak; below, overhead dominates: kernel launches, Python, waiting


@dataclass(eq=False)
class StepMeter:
    """Measures one step at a time."""

    backend: Backend
    journal: Journal

    def begin(self, step: int) -> StepMeter:
        """Start the clock after `step` complete steps; earlier sampling (for evaluation) does not count."""
        self._step = step
        self._parts_s: dict[str, float] = {}
        self.backend.take_sampling_work()
        self._out_s = self.backend.out_s()
        self._started = time.perf_counter()
        return self

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the step, and show its name in status.json."""
        self.journal.phase(name, self._step)
        key, started = f"{name}_time_s", time.perf_counter()
        yield
        self._parts_s[key] = self._parts_s.get(key, 0.0) + time.perf_counter() - started

    def timing(self) -> Timing:
        """Return the seconds since the step began, never zero, and those of its parts."""
        return Timing(step_time_s=max(time.perf_counter() - self._started, 1e-9), **self._parts_s)

    def pause(self) -> ApiPause | None:
        """Return how long the API worked on none of the run's calls; None for backends that do not say it."""
        now_s = self.backend.out_s()
        if now_s is None or self._out_s is None:
            return None
        return ApiPause(pause_s=now_s - self._out_s, pauses_s=now_s)


def roofline(
    table: BackPressureSection, sampling: SamplingWork | None, training: Work | None
) -> RooflineSummary | None:
    """Return what limited each phase and how much of the peaks it used; None where no peak is configured.

    A phase is unknown if its work is unknown (None) or if this machine did none in this step.
    """
    if not (table.peak_gflops or table.peak_bw_gb_s):
        return None
    sampled = sampling or SamplingWork(Work(), Work())
    phases = {"prefill": sampled.prefill, "decode": sampled.decode, "train": training}
    hints = {phase: classify(table, work) for phase, work in phases.items()}
    return RooflineSummary(
        bounds={phase: hint.bound for phase, hint in hints.items()},
        mfu={phase: hint.mfu for phase, hint in hints.items()},
        mbu={phase: hint.mbu for phase, hint in hints.items()},
    )


@dataclass(frozen=True, slots=True)
class PhaseHint:
    """The hardware limit of a phase."""

    bound: str = "unknown"  # the nearest limit
    mfu: float | None = None  # model FLOPs utilization, the fraction of peak arithmetic used
    mbu: float | None = None  # memory bandwidth utilization


def classify(table: BackPressureSection, work: Work | None) -> PhaseHint:
    """Return what limits a phase: arithmetic, memory bandwidth or neither; unknown without work or a peak.

    Raises:
        ValueError: an amount is negative or not finite.

    Source: Williams, Waterman and Patterson, Roofline, CACM 52 (2009); MFU as in PaLM, arXiv:2204.02311.
    """
    if work is None or work.time_s <= 0.0:
        return PhaseHint()
    for name, amount in asdict(work).items():
        require(name, amount, 0.0 <= amount < math.inf, "a finite amount of at least 0")
    amounts = ((work.flops, table.peak_gflops), (work.bytes_moved, table.peak_bw_gb_s))
    mfu, mbu = (amount / (peak * 1e9) / work.time_s if peak else None for amount, peak in amounts)
    if mfu is None or mbu is None:
        return PhaseHint("unknown", mfu, mbu)
    if max(mfu, mbu) < ATTAINED_LEAST:
        return PhaseHint("overhead_bound", mfu, mbu)
    return PhaseHint("compute_bound" if mfu >= mbu else "memory_bound", mfu, mbu)
