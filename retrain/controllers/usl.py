"""Fits the Universal Scalability Law to measured throughputs, and says when they cannot identify it.

Nothing here decides what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from retrain.controllers.usl_identify import judged
from retrain.controllers.usl_law import UslFit
from retrain.controllers.usl_nls import fit_least_squares, to_coefficients
from retrain.controllers.usl_online import StepTime, fit_robust
from retrain.controllers.usl_scaled import ROUNDING, Data, leaning, standard_errors

__all__ = ["UslFit", "fit_usl"]

FloatArray = NDArray[np.float64]


def fit_usl(
    p: Sequence[float] | FloatArray, x: Sequence[float] | FloatArray, method: Literal["nls", "online"] = "nls"
) -> UslFit:
    """Fit the curve to throughputs `x` measured at concurrencies `p`.

    Args:
        p: concurrencies, positive, shape (n,); repeats are welcome.
        x: throughputs, positive, any unit, shape (n,).
        method: "nls" minimises squared errors of throughput with sigma and kappa in [0, 1], which
            reproduces published coefficients. "online" is the controller's fit: squared relative errors
            of the time per step, non-negative, and deaf to outliers.

    Raises:
        ValueError: shapes differ, nothing was measured, a value is not positive and finite, or the
            method is unknown.
    """
    if method not in ("nls", "online"):
        raise ValueError(f"method: got {method!r}; use 'nls' or 'online'")
    data = Data.of(*_checked(p, x))
    time = fit_robust(data.q, data.y)
    theta = to_coefficients(time, data) if method == "online" else fit_least_squares(data, time)
    jacobian, residuals = _linearised(data, theta, relative=method == "online")
    bound = np.where(theta >= data.upper, 1.0, np.where(theta <= 0.0, -1.0, 0.0))
    errors = standard_errors(jacobian, residuals, bound == 0.0)
    fit = UslFit(
        *data.plain(theta),
        sigma_error=float(errors[0]) * data.one,
        kappa_error=float(errors[1]) * data.one**2,
        lambda_error=float(errors[2]) * data.plain(theta)[2],
        freedom=max(0, len(data.q) - int((bound == 0.0).sum())),
    )
    return judged(fit, data.q * data.p_unit, leaning(jacobian, residuals, bound)[:2])


def from_step_time(time: StepTime) -> tuple[float, float, float]:
    """Turn p / X = lead + load p + crowd p^2 into (sigma, kappa, lambda)."""
    total = time.lead + time.load + time.crowd
    return (time.load + time.crowd) / total, time.crowd / total, 1.0 / total


def _linearised(data: Data, theta: FloatArray, *, relative: bool) -> tuple[FloatArray, FloatArray]:
    """Jacobian in (contention, crosstalk, log level) and residuals, of log y or of y itself."""
    curve, jacobian = data.curve(theta), data.log_jacobian(theta)
    residuals = np.log(data.y / curve) if relative else data.y - curve
    residuals = np.where(np.abs(residuals) < ROUNDING, 0.0, residuals)
    return jacobian if relative else curve[:, None] * jacobian, residuals


def _checked(
    p: Sequence[float] | FloatArray, x: Sequence[float] | FloatArray
) -> tuple[FloatArray, FloatArray]:
    concurrency, throughput = np.asarray(p, dtype=float), np.asarray(x, dtype=float)
    if concurrency.ndim != 1 or concurrency.shape != throughput.shape or concurrency.size == 0:
        raise ValueError(
            f"p and x: got shapes {concurrency.shape} and {throughput.shape}; "
            "give two equally long, non-empty lists"
        )
    for name, values in (("p", concurrency), ("x", throughput)):
        bad = values[~(np.isfinite(values) & (values > 0.0))]
        if bad.size:
            raise ValueError(f"{name}: got {bad[0]}; every value must be positive and finite")
    return concurrency, throughput
