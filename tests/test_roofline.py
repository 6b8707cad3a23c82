"""Roofline hints name the nearest hardware limit, or say that they cannot."""

from __future__ import annotations

import math

import pytest

from retrain.controllers.roofline import PhaseHint, classify

PEAK_GFLOPS, PEAK_GB_S = 1000.0, 100.0


def hint_of(flops: float | None, moved: float | None, time_s: float, peak_gflops: float) -> PhaseHint:
    return classify(flops, moved, time_s, peak_gflops=peak_gflops, peak_bw_gb_s=PEAK_GB_S)


@pytest.mark.parametrize(
    ("flops", "moved", "bound"),
    [
        (0.9e12, 20e9, "compute_bound"),
        (0.2e12, 80e9, "memory_bound"),
        (0.2e12, 20e9, "overhead_bound"),
        (None, 80e9, "unknown"),
        (0.9e12, None, "unknown"),
    ],
)
def test_the_larger_share_of_the_roof_names_the_bound(flops, moved, bound):
    assert hint_of(flops, moved, 1.0, PEAK_GFLOPS).bound == bound


def test_utilisations_are_shares_of_the_peaks():
    hint = hint_of(0.5e12, 90e9, 2.0, PEAK_GFLOPS)

    assert (hint.mfu, hint.mbu) == (pytest.approx(0.25), pytest.approx(0.45))


def test_peaks_of_zero_mean_unknown():
    hint = hint_of(0.5e12, 90e9, 2.0, 0.0)

    assert (hint.bound, hint.mfu, hint.mbu) == ("unknown", None, pytest.approx(0.45))


@pytest.mark.parametrize(
    ("work", "peak_gflops", "message"),
    [
        ((1.0, 1.0, 0.0), 1.0, "time_s: got 0.0"),
        ((1.0, 1.0, math.nan), 1.0, "time_s"),
        ((-1.0, 1.0, 1.0), 1.0, "flops: got -1.0"),
        ((1.0, math.inf, 1.0), 1.0, "bytes_moved: got inf"),
        ((1.0, 1.0, 1.0), -1.0, "peak_gflops: got -1.0"),
    ],
)
def test_impossible_amounts_are_refused_by_name(work, peak_gflops, message):
    with pytest.raises(ValueError, match=message):
        hint_of(*work, peak_gflops)
