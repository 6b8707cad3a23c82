"""What limits each phase of a step on this hardware: hints for backends that know their work."""

from __future__ import annotations

from retrain.backends import Backend, SamplingWork, Work
from retrain.config.schema import BackPressure
from retrain.controllers.roofline import Phase, PhaseHint, PhaseWork, classify
from retrain.records.step_row import RooflineSummary


def take_sampling_work(backend: Backend) -> SamplingWork | None:
    """Give what sampling cost since the last call; None from a backend that does not measure it."""
    take = getattr(backend, "take_sampling_work", None)
    return take() if take is not None else None


def roofline(
    table: BackPressure, sampling: SamplingWork | None, training: Work | None
) -> RooflineSummary | None:
    """Return what limits each phase and how much of the peaks it uses; None where no peak is configured.

    A phase is unknown if its work is (None), or if there was none on this machine in this step.
    """
    if not (table.peak_gflops or table.peak_bw_gb_s):
        return None
    phases: dict[Phase, Work | None] = {
        "prefill": sampling.prefill if sampling else None,
        "decode": sampling.decode if sampling else None,
        "train": training,
    }
    hints = {
        phase: classify(
            PhaseWork(phase, work.flops, work.bytes_moved, work.time_s), table.peak_gflops, table.peak_bw_gb_s
        )
        if work is not None and work.time_s > 0.0
        else PhaseHint(phase, "unknown", None, None, "no work in this step")
        for phase, work in phases.items()
    }
    return RooflineSummary(
        bounds={phase: hint.bound for phase, hint in hints.items()},
        mfu={phase: hint.mfu for phase, hint in hints.items()},
        mbu={phase: hint.mbu for phase, hint in hints.items()},
    )
