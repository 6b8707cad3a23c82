"""Measures a step: the time of its parts, and what limited each phase on this hardware."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from retrain.backends import Backend, SamplingWork, Work
from retrain.config.schema import BackPressure
from retrain.controllers.roofline import Phase, PhaseHint, classify
from retrain.records.row_parts import ApiPause, EngineUse
from retrain.records.step_row import RooflineSummary, Timing
from retrain.trainer.journal import Journal


@dataclass(eq=False)
class StepMeter:
    """Measures one step at a time."""

    backend: Backend
    table: BackPressure  # with the peaks against which utilisation is measured
    journal: Journal

    def begin(self, step: int) -> StepMeter:
        """Start the clock after `step` complete steps; earlier sampling (for evaluation) does not count."""
        self._step = step
        self._parts_s: dict[str, float] = {}
        self._said("take_sampling_work")
        self._out_s = self._said("out_s")
        self._started = time.perf_counter()
        return self

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the step and show its name in status.json."""
        self.journal.phase(name, self._step)
        started = time.perf_counter()
        yield
        self._parts_s[f"{name}_time_s"] = time.perf_counter() - started

    def timing(self) -> Timing:
        """Return the seconds since the step began, never zero, and those of its parts."""
        return Timing(step_time_s=max(time.perf_counter() - self._started, 1e-9), **self._parts_s)

    def roofline(self, training: Work | None) -> RooflineSummary | None:
        """Return what limited each phase, given the work of the update."""
        return roofline(self.table, self._said("take_sampling_work"), training)

    def engine(self) -> EngineUse | None:
        """Return the load of the server that samples, if there is one that says it."""
        use: EngineUse | None = self._said("take_engine_use")
        return use

    def pause(self) -> ApiPause | None:
        """Return how long the API worked on none of the run's calls; None for backends that do not say it."""
        now_s = self._said("out_s")
        if now_s is None or self._out_s is None:
            return None
        return ApiPause(pause_s=now_s - self._out_s, pauses_s=now_s)

    def _said(self, name: str) -> Any:
        """Return what the backend's method of this name returns; None if it has none, as it may."""
        method = getattr(self.backend, name, None)
        return None if method is None else method()


def roofline(
    table: BackPressure, sampling: SamplingWork | None, training: Work | None
) -> RooflineSummary | None:
    """Return what limited each phase and how much of the peaks it used; None where no peak is configured.

    A phase is unknown if its work is unknown (None) or if this machine did none in this step.
    """
    if not (table.peak_gflops or table.peak_bw_gb_s):
        return None
    sampled = sampling or SamplingWork(Work(), Work())
    hints: dict[Phase, PhaseHint] = {
        "prefill": _hint(table, sampled.prefill),
        "decode": _hint(table, sampled.decode),
        "train": _hint(table, training),
    }
    return RooflineSummary(
        bounds={phase: hint.bound for phase, hint in hints.items()},
        mfu={phase: hint.mfu for phase, hint in hints.items()},
        mbu={phase: hint.mbu for phase, hint in hints.items()},
    )


def _hint(table: BackPressure, work: Work | None) -> PhaseHint:
    if work is None or work.time_s <= 0.0:
        return PhaseHint()
    peaks = {"peak_gflops": table.peak_gflops, "peak_bw_gb_s": table.peak_bw_gb_s}
    return classify(work.flops, work.bytes_moved, work.time_s, **peaks)
