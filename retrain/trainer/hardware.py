"""What limits each phase of a step on this hardware: hints in the row, for backends that know their work."""

from __future__ import annotations

from typing import Any

from retrain.backends import Backend, SamplingWork, Work
from retrain.config.schema import BackPressure
from retrain.controllers.roofline import Phase, PhaseWork, classify


def take_sampling_work(backend: Backend) -> SamplingWork | None:
    """Give what sampling cost since the last call; None from a backend that does not measure it."""
    take = getattr(backend, "take_sampling_work", None)
    return take() if take is not None else None


def roofline_row(table: BackPressure, sampling: SamplingWork | None, training: Work | None) -> dict[str, Any]:
    """Give `roofline_<phase>`, `mfu_<phase>` and `mbu_<phase>`; nothing where no peak is configured.

    A phase is unknown if its work is (None), or if there was none on this machine in this step.
    """
    if not (table.peak_gflops or table.peak_bw_gb_s):
        return {}
    phases: dict[Phase, Work | None] = {
        "prefill": sampling.prefill if sampling else None,
        "decode": sampling.decode if sampling else None,
        "train": training,
    }
    row: dict[str, Any] = {}
    for phase, work in phases.items():
        row |= {f"roofline_{phase}": "unknown", f"mfu_{phase}": None, f"mbu_{phase}": None}
        if work is None or work.time_s <= 0.0:
            continue
        told = PhaseWork(phase, work.flops, work.bytes_moved, work.time_s)
        hint = classify(told, table.peak_gflops, table.peak_bw_gb_s)
        row |= {f"roofline_{phase}": hint.bound, f"mfu_{phase}": hint.mfu, f"mbu_{phase}": hint.mbu}
    return row
