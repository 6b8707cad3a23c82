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

from retrain.control.rules.usl import UslFit, fit_usl

DATASETS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "usl_datasets.json").read_text()
)
NAMED = {dataset["name"]: dataset for dataset in DATASETS}


def usl(p: Any, sigma: float, kappa: float, lambda_: float) -> Any:
    return lambda_ * p / (1 + sigma * (p - 1) + kappa * p * (p - 1))


@pytest.mark.parametrize("dataset", DATASETS, ids=lambda dataset: dataset["name"])
def test_least_squares_reproduces_published_coefficients(dataset):
    fit = fit_usl(dataset["p"], dataset["X"], noise="absolute")

    tolerance = dataset["tolerance"]
    assert fit.sigma == pytest.approx(dataset["sigma"], rel=tolerance, abs=1e-5)
    assert fit.kappa == pytest.approx(dataset["kappa"], rel=tolerance, abs=1e-9)
    if dataset["lambda"] is not None:
        assert fit.lambda_ == pytest.approx(dataset["lambda"], rel=tolerance)


def test_a_published_curve_predicts_its_published_throughputs():
    cisco = NAMED["cisco_ucs_mysql"]
    fit = fit_usl(cisco["p"], cisco["X"], noise="absolute")

    assert math.floor(fit.p_star) == cisco["p_star"]
    for p in (1, 20, 35):
        assert fit.throughput(p) == pytest.approx(cisco["extra"][f"X({p})"], rel=1e-5)


@pytest.mark.parametrize("name", ["cisco_ucs_mysql", "raytracer_first6", "usl_synthetic_002"])
def test_standard_errors_agree_with_scipy(name):
    from scipy.optimize import curve_fit

    p, x = (np.array(NAMED[name][key], dtype=float) for key in ("p", "X"))
    _, covariance = curve_fit(usl, p, x, p0=[0.1, 0.01, float((x / p).max())], xtol=1e-14, ftol=1e-14)

    fit = fit_usl(p, x, noise="absolute")

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
@settings(max_examples=40, deadline=None)
def test_exact_data_give_back_their_coefficients(sigma, kappa_share, lambda_, method):
    p = np.array([1.0, 2, 4, 8, 16, 32, 64, 128])
    kappa = sigma * kappa_share

    fit = fit_usl(p, usl(p, sigma, kappa, lambda_), method=method)

    assert fit.sigma == pytest.approx(sigma, rel=1e-4, abs=1e-7)
    assert fit.kappa == pytest.approx(kappa, rel=1e-4, abs=1e-9)
    assert fit.lambda_ == pytest.approx(lambda_, rel=1e-5)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1.0, 1e5)), min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
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


POSITIVE = st.floats(5e-324, 1.7e308, allow_subnormal=True)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=12), st.sampled_from(["nls", "online"]))
@settings(max_examples=40, deadline=None)
def test_any_positive_data_give_a_finite_curve_or_a_stated_doubt(points, method):
    p, x = zip(*points, strict=True)
    fit = fit_usl(p, x, method=method)
    assert 0.0 <= fit.sigma <= 1.0
    assert 0.0 <= fit.kappa <= 1.0
    assert 0.0 < fit.lambda_ < math.inf
    assert fit.p_star >= 1.0
    assert fit.identified or fit.reason


@given(
    st.lists(st.tuples(st.integers(1, 512), st.floats(0.5, 2.0)), min_size=1, max_size=20),
    st.floats(-280, 280),
    st.sampled_from(["nls", "online"]),
)
@settings(max_examples=40, deadline=None)
def test_another_unit_of_throughput_changes_the_level_alone(points, exponent, method):
    p = [float(concurrency) for concurrency, _ in points]
    x = [usl(concurrency, 0.05, 0.001, 100.0) * factor for concurrency, factor in points]
    unit = 2.0 ** math.floor(exponent / math.log10(2.0))  # a power of two, so that no digit is lost

    plain, scaled = fit_usl(p, x, method), fit_usl(p, [unit * value for value in x], method)

    assert scaled.lambda_ == pytest.approx(plain.lambda_ * unit, rel=1e-12)
    assert (scaled.sigma, scaled.kappa) == (plain.sigma, plain.kappa)
    assert (scaled.identified, scaled.reason) == (plain.identified, plain.reason)


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


@pytest.mark.parametrize(
    ("method", "noise"), [("nls", "relative"), ("nls", "absolute"), ("online", "relative")]
)
@pytest.mark.parametrize(("sigma", "kappa"), [(0.05, 0.001), (0.1, 0.0), (0.0, 0.001)])
def test_intervals_hold_the_truth_about_as_often_as_they_claim(method, noise, sigma, kappa):
    rng, rounds = np.random.default_rng(7), 50
    p = np.array([1.0, 2, 4, 8, 16, 32, 64])
    clean, held = usl(p, sigma, kappa, 100.0), np.zeros(3)
    for _ in range(rounds):
        error = 0.03 * rng.normal(size=p.size)
        x = clean + error * clean.mean() if noise == "absolute" else clean * np.exp(error)
        intervals = fit_usl(p, x, method, noise).intervals
        truth = {"sigma": sigma, "kappa": kappa, "lambda": 100.0}
        held += [intervals[name][0] <= value <= intervals[name][1] for name, value in truth.items()]
    # 95 % of 50 is 47.5, give or take 1.5
    assert np.all(held >= 43)
    assert sigma * kappa == 0.0 or np.all(held < rounds)


@pytest.mark.parametrize("p", [2.0 ** np.arange(5), 2.0 ** np.arange(3, 10)])
def test_an_optimum_is_seldom_claimed_where_there_is_none(p):
    rng, rounds = np.random.default_rng(11), 60
    noisy = usl(p, 0.1, 0.0, 100.0) * np.exp(rng.normal(0, 0.1, (rounds, p.size)))
    fits = [fit_usl(p, x) for x in noisy]
    assert sum(fit.identified and math.isfinite(fit.p_star) for fit in fits) <= 3


def test_an_interval_of_a_coefficient_on_its_bound_is_not_empty():
    p = 2.0 ** np.arange(7)
    noise = 1 + 0.02 * np.array([1.0, -1, 1, -1, -1, -1, 1])
    fit = fit_usl(p, usl(p, 0.1, 0.0, 50.0) * noise)
    low, high = fit.intervals["kappa"]
    assert (fit.kappa, low) == (0.0, 0.0)
    assert fit.unbounded[1] < 0.0 < high


def test_published_intervals_are_reproduced():
    """R's usl gives estimate -/+ t(0.95, n - 1) standard errors."""
    data = NAMED["raytracer_first6"]
    fit, t = fit_usl(data["p"], data["X"], noise="absolute"), 2.0150
    for name, value, error in (
        ("sigma", fit.sigma, fit.sigma_error),
        ("kappa", fit.kappa, fit.kappa_error),
        ("lambda", fit.lambda_, fit.lambda_error),
    ):
        published = data["extra"][f"ci_{name}"]
        assert [value - t * error, value + t * error] == pytest.approx(published, rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("method", ["nls", "online"])
@pytest.mark.parametrize(
    ("p", "x", "why"),
    [
        ([1, 2, 4, 8, 16, 32], [value**1.3 for value in (1, 2, 4, 8, 16, 32)], "sigma would be below 0"),
        ([8, 16, 32], [100, 10, 1], "no observation is left over"),
        ([8, 16, 32], [10.0, 18.0, 27.0], "no observation is left over"),
        ([1, 2, 4, 8, 16, 32], [10.0, 22.0, 34.0, 88.0, 141.0, 330.0], "kappa may be up to"),
        ([1, 2, 4, 8, 12, 16, 24, 32], [10, 18, 30, 44, 50, 55, 75, 110.0], "no curve of this law"),
    ],
)
def test_data_that_no_single_curve_explains_are_called_unidentified(method, p, x, why):
    fit = fit_usl(p, x, method=method)
    assert not fit.identified
    assert why in fit.reason


def test_coefficients_stay_where_they_can_mean_something():
    fit = fit_usl([8, 16, 32], [100, 10, 1], method="nls")
    assert fit.kappa <= 1.0
    assert fit.lambda_ < 1e6


def test_no_optimum_is_claimed_only_as_far_as_was_measured():
    p = np.array([1.0, 2, 4, 8, 16, 32])
    noise = 1 + 0.003 * np.array([1.0, -1, 1, -1, -1, 1])
    fit = fit_usl(p, usl(p, 0.1, 0.0, 50.0) * noise)
    assert fit.identified
    assert fit.reason.startswith("no optimum up to 32; beyond")


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


@pytest.mark.parametrize(
    ("options", "message"),
    [({"method": "ols"}, "needs 'nls' or 'online'"), ({"noise": "pink"}, "needs 'relative' or 'absolute'")],
)
def test_an_unknown_method_or_noise_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fit_usl([1, 2, 3], [1.0, 2.0, 3.0], **options)


def test_an_optimum_is_never_below_one():
    assert UslFit(sigma=0.0, kappa=5.0, lambda_=1.0).p_star == 1.0
