"""Goodput, its throughput model and the batch it suggests, against numbers of AdaptDL."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from retrain.controllers.scaling.goodput import (
    Goodput,
    MeasuredStep,
    StepTimes,
    efficiency,
    fit_error,
    fit_step_times,
    phi_from,
)

PUBLISHED = json.loads((Path(__file__).parent / "data" / "scaling_rules.json").read_text())
NO_NETWORK = StepTimes(0.1, 0.01, 1e-8, 1e-8, 1e-8, 1e-8, 1.0)


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


def steps_of(case):
    times = zip(case["rows"], case["accum_step_time"], case["optim_step_time"], strict=True)
    return [MeasuredStep(*row, pass_s, last_pass_s) for row, pass_s, last_pass_s in times]


@pytest.mark.parametrize("case", PUBLISHED["goodput_fit"], ids=lambda case: case["name"])
def test_the_error_of_a_fit_is_as_published(case):
    assert fit_error(StepTimes(*case["true_params"]), steps_of(case)) == pytest.approx(
        case["objective_at_true"]
    )
    assert fit_error(StepTimes(*case["fitted"]), steps_of(case)) == pytest.approx(case["objective_at_fit"])


@pytest.mark.parametrize("case", PUBLISHED["goodput_fit"], ids=lambda case: case["name"])
def test_a_fit_is_at_least_as_good_as_published(case):
    fitted = fit_step_times(steps_of(case))
    nodes, replicas, atomic = np.array(case["rows"], dtype=float).T
    errors = fitted.last_pass_s(nodes, replicas, atomic) / np.array(case["optim_step_time"]) - 1
    assert fit_error(fitted, steps_of(case)) <= case["objective_at_fit"]
    assert np.abs(errors).max() <= max(case["max_rel_err_optim"], 1e-6)


def test_a_network_between_nodes_that_was_never_seen_costs_a_tenth_more_than_one_within():
    within = [MeasuredStep(1, n, 64, 0.2, 0.2 + 0.1 + 0.01 * (n - 2)) for n in (2, 4, 8)]
    fitted = fit_step_times(within)
    assert fitted.alpha_n == pytest.approx(1.1 * fitted.alpha_r)


def test_a_fit_refuses_to_start_from_nothing():
    with pytest.raises(ValueError, match="at least one measured step"):
        fit_step_times([])


def test_full_overlap_costs_the_longer_of_compute_and_network():
    times = StepTimes(1.0, 0.0, 1e-8, 1e-8, 0.5, 1e-8, 10.0)
    assert times.last_pass_s(1, 2, 1) == pytest.approx(1.0, rel=1e-3)


def test_without_signal_any_batch_is_fully_efficient():
    assert efficiency(4096, phi=math.inf, init_batch_size=8) == 1


def test_limits_that_admit_no_batch_are_refused_with_the_least_that_would_do():
    with pytest.raises(ValueError, match="at least 512 samples"):
        Goodput(NO_NETWORK, 100.0, 128).suggest(1, 4, max_batch_size=256, atomic_limits=(128, 256))
