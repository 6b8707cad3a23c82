"""Whether measurements determine the curve that was fitted to them, and if not, why.

Claims nothing that a 95 % interval does not bear out.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from retrain.controllers.usl.law import FloatArray, UslFit

COEFFICIENTS = 3


def judged(fit: UslFit, p: FloatArray, leaning: FloatArray) -> UslFit:
    """Return the fit with what is to be said of it.

    Args:
        fit: coefficients and errors.
        p: concurrencies measured, shape (n,).
        leaning: standard errors by which (sigma, kappa) want to leave their bounds, shape (2,).
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
        return "throughput falls faster than any curve of this law (sigma or kappa would pass 1)"
    if sigma < -fit.quantile:
        return "throughput grows faster than concurrency: no curve of this law (sigma would be below 0)"
    if kappa < -fit.quantile:
        return "throughput bends upwards: no curve of this law (kappa would be below 0)"
    return ""


def _undetermined(fit: UslFit, highest: float) -> str:
    high = fit.intervals["kappa"][1]
    if math.isinf(fit.kappa_error):
        return (
            "no observation is left over to tell noise from shape, or the concurrencies lie too close; "
            "measure more of them"
        )
    if fit.kappa > 0.0 and not fit.has_crosstalk:
        return f"kappa {fit.kappa:.3g} is not told from 0: its interval reaches to {high:.3g}"
    first = _earliest_optimum(fit)
    if fit.kappa == 0.0 and first <= highest:
        return f"kappa may be up to {high:.3g}: an optimum from {first:.4g} on is not excluded"
    return ""


def _earliest_optimum(fit: UslFit) -> float:
    """The p* of the largest kappa in its interval."""
    return UslFit(fit.sigma, fit.intervals["kappa"][1], fit.lambda_).p_star


def _extrapolated(fit: UslFit, lowest: float, highest: float) -> str:
    if highest < fit.p_star < math.inf:
        return f"p* {fit.p_star:.4g} is extrapolated: nothing was measured beyond {highest:.4g}"
    if fit.p_star < lowest:
        return f"p* {fit.p_star:.4g} is extrapolated: nothing was measured below {lowest:.4g}"
    if fit.kappa == 0.0 and _earliest_optimum(fit) < math.inf:
        return f"no optimum up to {highest:.4g}; beyond {_earliest_optimum(fit):.4g} one is not excluded"
    return ""
