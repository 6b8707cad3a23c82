"""Gradient noise scale, and batch sizes in informative groups: how much a batch teaches.

The noise scale is the noise of a step's gradient relative to its signal. It is computed from squared norms
alone, so that any framework can measure them; a single norm contains no information about noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules import StateDict, require

FIRST_SETTLED_STEP = 5  # before this step Adam's second moment is mostly noise
LEAST_SHARE = 1e-9  # keeps the formulas defined before the first informative group
LEAST_VAR = 1e-6  # gradient variance is never exactly 0; keeps factors and gains defined
SHARE_SMOOTHING = 0.99  # per initial batch; the share can drop from nearly all to a few within some hundred


def adam_preconditioner(second_moment: Floats, step: int, beta2: float, eps: float) -> Floats:
    """Return Adam's bias-corrected divisor of a parameter's update, shaped like `second_moment`.

    Ones before the fifth of its steps, when it is mostly noise.
    """
    if step < FIRST_SETTLED_STEP:
        return np.ones_like(second_moment)
    return np.sqrt(second_moment / (1 - beta2**step)) + eps


class GradientNoiseScale:
    """Smoothed squared norm of the true gradient and variance of the estimate, per parameter group.

    Units: `sqr` and `var` are squared gradient norms; `var` is the variance of a gradient at
    the initial batch size, which a batch S times as large divides it by S.

    Source: McCandlish et al., arXiv:1812.06162; estimators and smoothing of AdaScale,
        arXiv:2007.05105, and Pollux, arXiv:2008.12260.
    """

    def __init__(self, smoothing: float = 0.999) -> None:
        require("smoothing", smoothing, 0 <= smoothing < 1, "a number from 0 to below 1")
        self._smoothing = smoothing
        self._consecutive = False  # kind of the estimates averaged so far
        self._weight = 0.0  # sum of the average's weights; 0 before any estimate
        self._sqr: Floats = np.zeros(0)
        self._var: Floats = np.zeros(0)

    @property
    def is_known(self) -> bool:
        return self._weight > 0

    @property
    def is_consecutive(self) -> bool:
        """Whether the estimates come from consecutive steps, not from parts of steps."""
        return self.is_known and self._consecutive

    @property
    def sqr(self) -> Floats:
        """Squared norm of the true gradient, at least 0: (groups,); (1,) with value 1 before any estimate."""
        return np.maximum(self._sqr / self._weight, 0.0) if self.is_known else np.ones(1)

    @property
    def var(self) -> Floats:
        """Variance at the initial batch size, at least 1e-6: (groups,); (1,) before any estimate."""
        return np.maximum(self._var / self._weight if self.is_known else np.zeros(1), LEAST_VAR)

    @property
    def noise_scale(self) -> float:
        """Batch size at which noise equals signal, in initial batches; infinite without signal."""
        sqr = float(self.sqr.sum())
        return float(self.var.sum()) / sqr if sqr > 0 else math.inf

    def gain(self, scale: float) -> float:
        """Return how many steps at the initial batch equal one step at S times that batch: 1 to S."""
        sqr, var = float(self.sqr.sum()), float(self.var.sum())
        return (var + sqr) / (var / scale + sqr)

    def update(
        self, local_sqr_norms: Floats, mean_sqr_norm: Floats, scale: float, *, consecutive: bool = False
    ) -> bool:
        """Add one estimate to the average, from the gradients of n parts of a step.

        With L the mean of the parts' squared norms and T that of their mean, the true gradient's
        squared norm is (n T - L) / (n - 1) and the variance (L - T) S / (n - 1). If the
        kind of estimate changes (`consecutive` or not), a new average starts, since consecutive
        estimates also contain the change of the weights.

        Args:
            local_sqr_norms: (n, groups), n at least 2, of parts of equal size.
            mean_sqr_norm: (groups,), of the mean of the parts' gradients.
            scale: S, the step's batch over the initial batch.
            consecutive: the parts are the whole gradients of two consecutive steps, each of
                scale S, because one step has a single part.

        Returns whether the estimate was used: one that is not finite is skipped. ValueError if shapes do not
        fit, n is below 2, or `scale` is not positive.
        """
        local, mean = _checked(local_sqr_norms, mean_sqr_norm, scale)
        if not (np.isfinite(local).all() and np.isfinite(mean).all()):
            return False
        n, together = len(local), scale * (2 if consecutive else 1)
        sqr = (n * mean - local.mean(axis=0)) / (n - 1)
        var = (local.mean(axis=0) - mean) * together / (n - 1)
        if not self.is_known or consecutive != self._consecutive:
            self._consecutive, self._weight = consecutive, 0.0
            self._sqr, self._var = np.zeros_like(sqr), np.zeros_like(var)
        if sqr.shape != self._sqr.shape:
            raise ValueError(f"local_sqr_norms: got {sqr.size} groups; earlier ones had {self._sqr.size}")
        keep = self._smoothing**together
        self._sqr = keep * self._sqr + (1 - keep) * sqr
        self._var = keep * self._var + (1 - keep) * var
        self._weight = keep * self._weight + (1 - keep)
        return True

    def state_dict(self) -> StateDict:
        return {
            "smoothing": self._smoothing,
            "consecutive": self._consecutive,
            "weight": self._weight,
            "sqr": self._sqr.tolist(),
            "var": self._var.tolist(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._smoothing = float(state["smoothing"])
        self._consecutive = bool(state["consecutive"])
        self._weight = float(state["weight"])
        self._sqr = np.array(state["sqr"], dtype=np.float64)
        self._var = np.array(state["var"], dtype=np.float64)


def _checked(local_sqr_norms: Floats, mean_sqr_norm: Floats, scale: float) -> tuple[Floats, Floats]:
    local = np.asarray(local_sqr_norms, dtype=np.float64)
    mean = np.asarray(mean_sqr_norm, dtype=np.float64)
    shapes, fit = (local.shape, mean.shape), local.ndim == 2 and local.shape[1:] == mean.shape
    require("shapes of local_sqr_norms and mean_sqr_norm", shapes, fit, "(n, groups) and (groups,)")
    enough = (
        "at least 2 parts, because one norm cannot show noise; pair it with the previous step's gradient and "
        "pass consecutive=True"
    )
    require("local_sqr_norms", len(local), len(local) >= 2, enough)
    require("scale", scale, math.isfinite(scale) and scale > 0, "a finite number above 0")
    return local, mean


class InformativeGroups:
    """Moving average of the fraction of prompts whose group is informative.

    A prompt whose rollouts all have the same reward has no gradient; a batch of only such prompts makes no
    update. As fewer groups are informative, small batches skip more updates, while large batches still make
    every update from fewer groups: an eight times larger batch then has less than eight times the informative
    groups per update.
    """

    def __init__(self, init_batch_size: int) -> None:
        self._init_batch_size = init_batch_size
        self._sum = 0.0
        self._weight = 0.0  # 0 before any step

    @property
    def share(self) -> float:
        """Fraction of informative prompts; 1 before the first step."""
        return min(1.0, max(LEAST_SHARE, self._sum / self._weight)) if self._weight else 1.0

    @property
    def per_initial_update(self) -> float:
        """Mean number of informative groups in initial batches that have at least one."""
        return self._init_batch_size * self.share / self._update_share(1.0)

    def count(self, informative: int, prompts: int) -> None:
        """Count the groups of a step, with or without an update."""
        keep = SHARE_SMOOTHING ** (prompts / self._init_batch_size)
        self._sum = keep * self._sum + (1 - keep) * informative / prompts
        self._weight = keep * self._weight + (1 - keep)

    def effective_scale(self, scale: float) -> float:
        """Return the informative groups per update of `scale` initial batches, relative to one initial batch.

        Equals the number of updates that the same prompts would have made in initial batches: `scale` if
        every group is informative, 1 if hardly any is.
        """
        return scale * self._update_share(1.0) / self._update_share(scale)

    def state_dict(self) -> dict[str, float]:
        return {"sum": self._sum, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._sum, self._weight = float(state["sum"]), float(state["weight"])

    def _update_share(self, scale: float) -> float:
        """Return the probability that a batch of `scale` initial batches has an informative group."""
        if self.share == 1.0:
            return 1.0
        return -math.expm1(scale * self._init_batch_size * math.log1p(-self.share))
