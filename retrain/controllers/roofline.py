"""The hardware limit of each phase of a step: arithmetic, memory bandwidth, or neither.

Compares FLOPs / peak FLOP rate with bytes / peak bandwidth, per phase, and the larger of the two with
the measured time of the phase. The limit is unknown for a remote backend, which reports no FLOPs or bytes.

Source: Williams, Waterman and Patterson, Roofline, CACM 52 (2009); MFU as in PaLM, arXiv:2204.02311.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from retrain.controllers import require

Phase = Literal["decode", "prefill", "train"]
Bound = Literal["compute_bound", "memory_bound", "overhead_bound", "unknown"]

ATTAINED_LEAST = 0.3  # below this fraction of the roof, overhead dominates: kernel launches, Python, waiting


@dataclass(frozen=True)
class PhaseHint:
    """The hardware limit of a phase."""

    bound: Bound = "unknown"  # the nearest limit
    mfu: float | None = None  # model FLOPs utilization, the fraction of peak arithmetic used
    mbu: float | None = None  # memory bandwidth utilization


def classify(
    flops: float | None,
    bytes_moved: float | None,
    time_s: float,
    *,
    peak_gflops: float,
    peak_bw_gb_s: float,
) -> PhaseHint:
    """Return what limits a phase.

    Args:
        flops: floating-point operations; None if unknown.
        bytes_moved: bytes between memory and the cores (weights, and the KV cache when decoding), or None.
        time_s: duration in seconds.
        peak_gflops, peak_bw_gb_s: the machine's peaks; 0 if unknown.

    Raises:
        ValueError: the time is not positive, or an amount is negative or not finite.
    """
    require("time_s", time_s, 0.0 < time_s < math.inf, "a positive, finite time")
    amounts = (("flops", flops), ("bytes_moved", bytes_moved), ("peak_gflops", peak_gflops))
    for name, amount in (*amounts, ("peak_bw_gb_s", peak_bw_gb_s)):
        fits = amount is None or 0.0 <= amount < math.inf
        require(name, amount, fits, "a finite amount of at least 0")
    mfu = _utilisation(flops, peak_gflops, time_s)
    mbu = _utilisation(bytes_moved, peak_bw_gb_s, time_s)
    if mfu is None or mbu is None:
        return PhaseHint("unknown", mfu, mbu)
    if max(mfu, mbu) < ATTAINED_LEAST:
        return PhaseHint("overhead_bound", mfu, mbu)
    return PhaseHint("compute_bound" if mfu >= mbu else "memory_bound", mfu, mbu)


def _utilisation(amount: float | None, peak_giga_per_s: float, time_s: float) -> float | None:
    """Return the fraction of a peak rate used: ideal time over measured time."""
    if amount is None or peak_giga_per_s == 0.0:
        return None
    return amount / (peak_giga_per_s * 1e9) / time_s
