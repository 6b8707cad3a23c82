"""Which hardware limit a phase of a step runs into: arithmetic, memory bandwidth, or neither.

Compares FLOPs / peak FLOP rate with bytes / peak bandwidth, per phase, and the larger of the two with
the time the phase really took. Unknown stays unknown: a remote backend gives no FLOPs or bytes.

Source: Williams, Waterman and Patterson, Roofline, CACM 52 (2009); MFU as in PaLM, arXiv:2204.02311.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Phase = Literal["decode", "prefill", "train"]
Bound = Literal["compute_bound", "memory_bound", "overhead_bound", "unknown"]

ATTAINED_LEAST = 0.3  # below this share of the roof the time goes elsewhere: launches, Python, waiting
FORWARD_FLOPS = 2  # per parameter and token: a multiplication and an addition
TRAIN_FLOPS = 6  # forward, gradient of activations, gradient of weights
LORA_TRAIN_FLOPS = 4  # the frozen weights need no gradient of their own


@dataclass(frozen=True)
class PhaseWork:
    """What one phase of a step did; None where the backend cannot know.

    Attributes:
        flops: floating-point operations.
        bytes_moved: bytes between memory and the cores (weights, and the KV cache when decoding).
        time_s: seconds it took.
    """

    phase: Phase
    flops: float | None
    bytes_moved: float | None
    time_s: float


@dataclass(frozen=True)
class PhaseHint:
    """What limits a phase.

    Attributes:
        bound: the nearest limit.
        mfu: model FLOPs utilisation, the share of peak arithmetic used; None when unknown.
        mbu: memory bandwidth utilisation, likewise.
        reason: how the bound was decided.
    """

    phase: Phase
    bound: Bound
    mfu: float | None
    mbu: float | None
    reason: str


def token_flops(parameters: float, tokens: float, phase: Phase, *, lora: bool = False) -> float:
    """FLOPs of passing `tokens` through a dense model, attention's quadratic part left out."""
    if phase == "train":
        return (LORA_TRAIN_FLOPS if lora else TRAIN_FLOPS) * parameters * tokens
    return FORWARD_FLOPS * parameters * tokens


def decode_bytes(
    weight_bytes: float, forward_passes: float, kv_bytes_per_token: float, kv_tokens: float
) -> float:
    """Bytes moved while decoding: all weights once per pass, and every cached token each time it is read.

    Args:
        weight_bytes: size of the weights.
        forward_passes: decoding steps, each for the whole batch.
        kv_bytes_per_token: keys and values of one token, all layers.
        kv_tokens: cached tokens read, summed over passes and sequences.
    """
    return weight_bytes * forward_passes + kv_bytes_per_token * kv_tokens


def classify(work: PhaseWork, peak_gflops: float, peak_bw_gb_s: float) -> PhaseHint:
    """Name what limits a phase; a peak of 0 means not known.

    Raises:
        ValueError: a time that is not positive, or a negative or non-finite amount.
    """
    _check(work, peak_gflops, peak_bw_gb_s)
    mfu = _utilisation(work.flops, peak_gflops, work.time_s)
    mbu = _utilisation(work.bytes_moved, peak_bw_gb_s, work.time_s)
    if mfu is None or mbu is None:
        return PhaseHint(work.phase, "unknown", mfu, mbu, "FLOPs, bytes or the machine's peaks are not known")
    attained = max(mfu, mbu)
    if attained < ATTAINED_LEAST:
        reason = f"{attained:.0%} of the roof attained; the time goes elsewhere"
        return PhaseHint(work.phase, "overhead_bound", mfu, mbu, reason)
    bound: Bound = "compute_bound" if mfu >= mbu else "memory_bound"
    return PhaseHint(work.phase, bound, mfu, mbu, f"{attained:.0%} of the roof attained")


def _utilisation(amount: float | None, peak_giga_per_s: float, time_s: float) -> float | None:
    """Share of a peak rate that was used; the ratio of the ideal time to the time taken."""
    if amount is None or peak_giga_per_s == 0.0:
        return None
    return amount / (peak_giga_per_s * 1e9) / time_s


def _check(work: PhaseWork, peak_gflops: float, peak_bw_gb_s: float) -> None:
    if not (0.0 < work.time_s < math.inf):
        raise ValueError(f"time_s: got {work.time_s}; a phase takes a positive, finite time")
    amounts = {
        "flops": work.flops,
        "bytes_moved": work.bytes_moved,
        "peak_gflops": peak_gflops,
        "peak_bw_gb_s": peak_bw_gb_s,
    }
    for name, amount in amounts.items():
        if amount is not None and not (0.0 <= amount < math.inf):
            raise ValueError(f"{name}: got {amount}; needs a finite amount of at least 0")
