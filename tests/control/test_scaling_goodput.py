"""Goodput, its throughput model and the batch it suggests, against numbers of AdaptDL."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from retrain.control.rules.scaling import Goodput, StepTimes, efficiency

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "scaling_rules.json").read_text())
NO_NETWORK = StepTimes(0.1, 0.01, 1e-8, 1e-8, 1e-8, 1e-8, 1.0)


def phi_from(grad_sqr: float, grad_var: float, init_batch_size: float) -> float:
    """Return the gradient noise scale in samples from the signal and the variance at the initial batch.

    Infinite with noise but no signal; 0 with neither, since a larger batch then gains nothing.
    """
    if grad_sqr > 0:
        return init_batch_size * grad_var / grad_sqr
    return math.inf if grad_var > 0 else 0.0


def goodput_of(case):
    phi = phi_from(*case["grad"], case["init_batch_size"])
    return Goodput(StepTimes(*case["perf"]), phi, case["init_batch_size"])


@pytest.mark.parametrize("case", PUBLISHED["efficiency"])
def test_efficiency_is_as_published(case):
    phi = phi_from(case["grad_sqr"], case["grad_var"], case["init_batch_size"])
    found = efficiency(case["batch_size"], phi=phi, init_batch_size=case["init_batch_size"])
    assert found == pytest.approx(case["efficiency"], rel=1e-12)


@pytest.mark.parametrize("case", PUBLISHED["goodput_evaluate"])
def test_throughput_and_goodput_are_as_published(case):
    setting = (case["num_nodes"], case["num_replicas"], case["atomic_bsz"], case["accum_steps"])
    assert goodput_of(case).times.throughput(*setting) == pytest.approx(case["throughput"], rel=1e-9)
    assert goodput_of(case).evaluate(*setting) == pytest.approx(case["goodput"], rel=1e-9)
    batch = case["num_replicas"] * case["atomic_bsz"] * (case["accum_steps"] + 1)
    found = efficiency(batch, phi=goodput_of(case).phi, init_batch_size=case["init_batch_size"])
    assert found == pytest.approx(case["efficiency"])


@pytest.mark.parametrize("case", PUBLISHED["goodput_optimize"])
def test_suggested_batches_are_as_published(case):
    limits = case["atomic_bsz_range"]
    found = goodput_of(case).suggest(
        case["num_nodes"],
        case["num_replicas"],
        max_batch_size=case["max_batch_size"],
        atomic_limits=limits and tuple(limits),
        accumulation=case["accumulation"],
    )
    assert (found.atomic_batch, found.accumulation_steps) == (case["atomic_bsz"], case["accum_steps"])
    assert found.goodput == pytest.approx(case["goodput"], rel=1e-9)


def test_full_overlap_costs_the_longer_of_compute_and_network():
    times = StepTimes(1.0, 0.0, 1e-8, 1e-8, 0.5, 1e-8, 10.0)
    assert times.last_pass_s(1, 2, 1) == pytest.approx(1.0, rel=1e-3)


def test_without_signal_any_batch_is_fully_efficient():
    assert efficiency(4096, phi=math.inf, init_batch_size=8) == 1


def test_limits_that_admit_no_batch_are_refused_with_the_least_that_would_do():
    with pytest.raises(ValueError, match="at least 512 samples"):
        Goodput(NO_NETWORK, 100.0, 128).suggest(1, 4, max_batch_size=256, atomic_limits=(128, 256))


def test_a_pass_too_small_for_the_initial_batch_needs_accumulation():
    goodput = Goodput(NO_NETWORK, 100.0, 40)
    with pytest.raises(ValueError, match="accumulation=False: no batch fits; a step needs at least 40"):
        goodput.suggest(1, 2, atomic_limits=(1, 19))
    found = goodput.suggest(1, 2, atomic_limits=(1, 19), accumulation=True)
    assert (found.atomic_batch, found.accumulation_steps) == (10, 1)
