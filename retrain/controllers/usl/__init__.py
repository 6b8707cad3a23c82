"""Fit the Universal Scalability Law to measured throughputs, and check whether they identify it.

This module only fits; decisions are made by the controller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from retrain.controllers.usl.law import FloatArray, UslFit
from retrain.controllers.usl.nls import (
    Data,
    Misfit,
    fit_least_squares,
    fit_unbounded,
    leaning,
    standard_errors,
    to_coefficients,
)
from retrain.controllers.usl.online import StepTime, fit_robust

__all__ = ["UslFit", "fit_usl"]


def fit_usl(
    p: Sequence[float] | FloatArray,
    x: Sequence[float] | FloatArray,
    method: Literal["nls", "online"] = "nls",
    noise: Literal["relative", "absolute"] = "relative",
) -> UslFit:
    """Fit the curve to throughputs `x` measured at concurrencies `p`.

    Args:
        p: concurrencies, positive, shape (n,); may contain repeats.
        x: throughputs, positive, any unit, shape (n,).
        method: "nls" is least squares with sigma and kappa in [0, 1]. "online" is the controller's fit:
            squared relative errors of the time per step, non-negative, and robust to outliers.
        noise: for "nls". "relative" minimizes squared errors of log throughput, because measurement
            noise is proportional to throughput. "absolute" minimizes squared errors of throughput, as
            published fits do; its intervals are valid only if all throughputs have the same noise.

    Raises:
        ValueError: shapes differ or are empty, a value is not positive and finite, or the method or
            noise is unknown.
    """
    if method not in ("nls", "online"):
        raise ValueError(f"method: got {method!r}; use 'nls' or 'online'")
    if noise not in ("relative", "absolute"):
        raise ValueError(f"noise: got {noise!r}; use 'relative' or 'absolute'")
    data = Data.of(*_checked(p, x))
    time = fit_robust(data.q, data.y)
    misfit = Misfit(data, method == "online" or noise == "relative")
    theta = to_coefficients(time, data) if method == "online" else fit_least_squares(misfit, time)
    bound = np.where(theta >= data.upper, 1.0, np.where(theta <= 0.0, -1.0, 0.0))
    free = fit_unbounded(misfit, theta) if method == "nls" and bound.any() else theta
    errors = standard_errors(misfit.jacobian(free), misfit.rounded_residuals(free))
    fit = UslFit(
        *data.plain(theta),
        sigma_error=float(errors[0]) * data.one,
        kappa_error=float(errors[1]) * data.one**2,
        lambda_error=float(errors[2]) * data.plain(theta)[2],
        freedom=max(0, len(data.q) - len(theta)),
        unbounded=(float(free[0]) * data.one, float(free[1]) * data.one**2),
    )
    lean = leaning(misfit.jacobian(theta), misfit.rounded_residuals(theta), bound)
    return judged(fit, data.q * data.p_unit, lean[:2])


def from_step_time(time: StepTime) -> tuple[float, float, float]:
    """Convert p / X = lead + load p + crowd p^2 to (sigma, kappa, lambda)."""
    total = time.lead + time.load + time.crowd
    return (time.load + time.crowd) / total, time.crowd / total, 1.0 / total


def _checked(
    p: Sequence[float] | FloatArray, x: Sequence[float] | FloatArray
) -> tuple[FloatArray, FloatArray]:
    concurrency, throughput = np.asarray(p, dtype=float), np.asarray(x, dtype=float)
    if concurrency.ndim != 1 or concurrency.shape != throughput.shape or concurrency.size == 0:
        raise ValueError(
            f"p and x: got shapes {concurrency.shape} and {throughput.shape}; "
            "needs two equally long, non-empty lists"
        )
    for name, values in (("p", concurrency), ("x", throughput)):
        bad = values[~(np.isfinite(values) & (values > 0.0))]
        if bad.size:
            raise ValueError(f"{name}: got {bad[0]}; needs positive, finite values")
    return concurrency, throughput


COEFFICIENTS = 3


def judged(fit: UslFit, p: FloatArray, leaning: FloatArray) -> UslFit:
    """Return the fit with `identified` and `reason` set.

    Args:
        fit: coefficients and errors.
        p: concurrencies measured, shape (n,).
        leaning: standard errors by which the unbounded (sigma, kappa) exceed their bounds, shape (2,).
    """
    reason = _too_few(p) or _another_shape(fit, leaning) or _undetermined(fit, float(p.max()))
    if reason:
        return replace(fit, identified=False, reason=reason)
    return replace(fit, reason=_extrapolated(fit, float(p.min()), float(p.max())))


def _too_few(p: FloatArray) -> str:
    distinct = len(np.unique(p))
    if distinct < COEFFICIENTS:
        return f"{distinct} distinct concurrencies cannot identify three coefficients; measure at least 3"
    return ""


def _another_shape(fit: UslFit, leaning: FloatArray) -> str:
    sigma, kappa = leaning.tolist()
    if max(sigma, kappa) > fit.quantile:
        return "throughput falls faster than any curve of this law (sigma or kappa would be above 1)"
    if sigma < -fit.quantile:
        return "throughput grows faster than concurrency: no curve of this law (sigma would be below 0)"
    if kappa < -fit.quantile:
        return "throughput bends upwards: no curve of this law (kappa would be below 0)"
    return ""


def _undetermined(fit: UslFit, highest: float) -> str:
    high = fit.intervals["kappa"][1]
    if math.isinf(fit.kappa_error):
        return (
            "no observation is left over to estimate noise, or the concurrencies are too close; "
            "measure at more concurrencies"
        )
    if fit.kappa > 0.0 and not fit.has_crosstalk:
        return f"kappa {fit.kappa:.3g} is not significantly above 0: its interval extends to {high:.3g}"
    first = _earliest_optimum(fit)
    if fit.kappa == 0.0 and first <= highest:
        return f"kappa may be up to {high:.3g}: an optimum at {first:.4g} or above is possible"
    return ""


def _earliest_optimum(fit: UslFit) -> float:
    """Return p* for the largest kappa in its interval."""
    return UslFit(fit.sigma, fit.intervals["kappa"][1], fit.lambda_).p_star


def _extrapolated(fit: UslFit, lowest: float, highest: float) -> str:
    if highest < fit.p_star < math.inf:
        return f"p* {fit.p_star:.4g} is extrapolated: nothing was measured beyond {highest:.4g}"
    if fit.p_star < lowest:
        return f"p* {fit.p_star:.4g} is extrapolated: nothing was measured below {lowest:.4g}"
    if fit.kappa == 0.0 and _earliest_optimum(fit) < math.inf:
        return f"no optimum up to {highest:.4g}; beyond {_earliest_optimum(fit):.4g} an optimum is possible"
    return ""
