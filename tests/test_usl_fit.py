"""`fit_usl` reproduces published coefficients, and says when data cannot identify a curve."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import curve_fit

from retrain.controllers.usl import UslFit, fit_usl

DATASETS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "usl_datasets.json").read_text()
)
NAMED = {dataset["name"]: dataset for dataset in DATASETS}


def usl(p: Any, sigma: float, kappa: float, lambda_: float) -> Any:
    return lambda_ * p / (1 + sigma * (p - 1) + kappa * p * (p - 1))


@pytest.mark.parametrize("dataset", DATASETS, ids=lambda dataset: dataset["name"])
def test_least_squares_reproduces_published_coefficients(dataset):
    fit = fit_usl(dataset["p"], dataset["X"], method="nls")

    tolerance = dataset["tolerance"]
    assert fit.sigma == pytest.approx(dataset["sigma"], rel=tolerance, abs=1e-5)
    assert fit.kappa == pytest.approx(dataset["kappa"], rel=tolerance, abs=1e-9)
    if dataset["lambda"] is not None:
        assert fit.lambda_ == pytest.approx(dataset["lambda"], rel=tolerance)


def test_a_published_curve_predicts_its_published_throughputs():
    cisco = NAMED["cisco_ucs_mysql"]
    fit = fit_usl(cisco["p"], cisco["X"])

    assert math.floor(fit.p_star) == cisco["p_star"]
    for p in (1, 20, 35):
        assert fit.throughput(p) == pytest.approx(cisco["extra"][f"X({p})"], rel=1e-5)


@pytest.mark.parametrize("name", ["cisco_ucs_mysql", "raytracer_first6", "usl_synthetic_002"])
def test_standard_errors_agree_with_scipy(name):
    p, x = (np.array(NAMED[name][key], dtype=float) for key in ("p", "X"))
    _, covariance = curve_fit(usl, p, x, p0=[0.1, 0.01, float((x / p).max())], xtol=1e-14, ftol=1e-14)

    fit = fit_usl(p, x)

    errors = [fit.sigma_error, fit.kappa_error, fit.lambda_error]
    assert errors == pytest.approx(np.sqrt(np.diag(covariance)), rel=1e-3)


@pytest.mark.parametrize("method", ["nls", "online"])
@pytest.mark.parametrize("p", [[1, 3, 6], [8, 16, 32, 64, 128], [1, 1, 1000]])
def test_linear_data_have_no_optimum(method, p):
    fit = fit_usl(p, [2.0 * value for value in p], method=method)

    assert (fit.sigma, fit.kappa, fit.p_star, fit.peak) == (0.0, 0.0, math.inf, math.inf)
    assert fit.lambda_ == pytest.approx(2.0)


@pytest.mark.parametrize("method", ["nls", "online"])
def test_contention_without_crosstalk_has_a_peak_but_no_optimum(method):
    p = np.array([1.0, 4, 16, 64, 256])

    fit = fit_usl(p, usl(p, 0.1, 0.0, 50.0), method=method)

    assert (fit.kappa, fit.p_star) == (0.0, math.inf)
    assert fit.peak == pytest.approx(500.0)


@pytest.mark.parametrize("method", ["nls", "online"])
def test_a_crosstalk_coefficient_on_its_bound_has_no_error(method):
    p = np.array([1.0, 4, 16, 64, 256])
    assert fit_usl(p, usl(p, 0.1, 0.0, 50.0), method=method).kappa_error == 0.0


@given(
    sigma=st.floats(0.001, 0.3),
    kappa_share=st.floats(0.01, 1.0),
    lambda_=st.floats(0.01, 1e6),
    method=st.sampled_from(["nls", "online"]),
)
@settings(max_examples=60, deadline=None)
def test_exact_data_give_back_their_coefficients(sigma, kappa_share, lambda_, method):
    p = np.array([1.0, 2, 4, 8, 16, 32, 64, 128])
    kappa = sigma * kappa_share

    fit = fit_usl(p, usl(p, sigma, kappa, lambda_), method=method)

    assert fit.sigma == pytest.approx(sigma, rel=1e-4, abs=1e-7)
    assert fit.kappa == pytest.approx(kappa, rel=1e-4, abs=1e-9)
    assert fit.lambda_ == pytest.approx(lambda_, rel=1e-5)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1.0, 1e5)), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_p_star_is_the_argmax_of_the_fitted_curve_whatever_the_data(points):
    p, x = zip(*points, strict=True)
    for method in ("nls", "online"):
        fit = fit_usl(p, x, method=method)

        grid = np.geomspace(1.0, 1e6, 400)
        highest = float(fit.throughput(grid).max())
        assert 0.0 <= fit.sigma <= 1.0
        assert fit.kappa >= 0.0
        if math.isfinite(fit.p_star):
            assert fit.throughput(fit.p_star) >= highest * (1.0 - 1e-9)
        else:
            assert highest == pytest.approx(float(fit.throughput(grid)[-1]))


@given(st.permutations(range(11)))
@settings(max_examples=20, deadline=None)
def test_the_order_of_observations_does_not_matter(order):
    data = NAMED["raytracer_usl_nls_full"]
    p, x = np.array(data["p"])[order], np.array(data["X"])[order]

    assert fit_usl(p, x, "online").sigma == pytest.approx(
        fit_usl(data["p"], data["X"], "online").sigma, rel=1e-6
    )


def test_the_online_fit_shrugs_off_stalled_steps():
    rng = np.random.default_rng(0)
    p = np.tile([8.0, 16, 32, 64, 128, 256], 8)
    clean = usl(p, 0.02, 0.0002, 100.0) * np.exp(rng.normal(0, 0.02, p.size))
    stalled = np.where(np.arange(p.size) % 16 == 3, clean / 6, clean)

    assert fit_usl(p, stalled, "online").p_star == pytest.approx(70.0, rel=0.1)


def test_fewer_than_three_concurrencies_cannot_identify_the_curve():
    fit = fit_usl([8, 8, 16], [10.0, 11.0, 18.0])

    assert not fit.identified
    assert "2 distinct concurrencies" in fit.reason


def test_crosstalk_lost_in_noise_is_called_unidentified():
    data = NAMED["raytracer_usl_nls_full"]
    fit = fit_usl(data["p"], data["X"], method="online")

    assert not fit.identified
    assert "kappa" in fit.reason


def test_an_optimum_beyond_the_data_is_called_extrapolated():
    cisco = NAMED["cisco_ucs_mysql"]
    fit = fit_usl(cisco["p"], cisco["X"])

    assert fit.identified
    assert "extrapolated" in fit.reason


@pytest.mark.parametrize(
    ("p", "x", "message"),
    [
        ([1, 2, 3], [1.0, math.nan, 3.0], "x: got nan"),
        ([1, 2, 3], [1.0, -2.0, 3.0], "x: got -2.0"),
        ([0, 2, 3], [1.0, 2.0, 3.0], "p: got 0.0"),
        ([1, 2], [1.0], "two equally long"),
        ([], [], "non-empty"),
    ],
)
def test_bad_data_are_refused_by_name(p, x, message):
    with pytest.raises(ValueError, match=message):
        fit_usl(p, x)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="use 'nls' or 'online'"):
        fit_usl([1, 2, 3], [1.0, 2.0, 3.0], method="ols")  # type: ignore[arg-type]


def test_an_optimum_is_never_below_one():
    assert UslFit(sigma=0.0, kappa=5.0, lambda_=1.0).p_star == 1.0
