"""Learning-rate rules and schedules: the factor of a step's learning rate.

Each rule is a formula of S, the step's batch over the initial batch, and the gradient noise; a missing
argument is an error.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules import StateDict, require
from retrain.control.rules.scaling.noise_scale import LEAST_VAR, GradientNoiseScale, InformativeGroups
from retrain.records.step_row import ScalingDecision


class ScalingRule(ABC):
    """Map the batch scale S to one learning-rate factor per parameter group."""

    rests_on_noise = False  # whether the rule needs `grad_sqr` and `grad_var`

    def lr_factor(
        self,
        scale: float,
        *,
        grad_sqr: Floats | float | None = None,
        grad_var: Floats | float | None = None,
        progress: float | None = None,
        init_batch_size: float | None = None,
    ) -> Floats:
        """Return the factor of each parameter group's learning rate for this step.

        Args:
            scale: S, this step's batch divided by the initial batch.
            grad_sqr: squared norm of the true gradient per group, raised to at least 0.
            grad_var: gradient variance at the initial batch size per group, raised to at least 1e-6.
            progress: steps so far, in equivalent steps at the initial batch (see
                `GradientNoiseScale.gain`).
            init_batch_size: samples of the initial batch.

        Returns shape (groups,), or (1,) if no group's gradient is given. ValueError if an argument that the
        rule needs is missing, or a number is out of range.
        """
        for name, value in (("scale", scale), ("init_batch_size", init_batch_size)):
            fits = value is None or (math.isfinite(value) and value > 0)
            require(name, value, fits, "a finite number above 0")
        require("progress", progress, progress is None or progress >= 0, "a number of 0 or more")
        sqr = None if grad_sqr is None else np.maximum(np.atleast_1d(np.asarray(grad_sqr, float)), 0.0)
        var = None if grad_var is None else np.maximum(np.atleast_1d(np.asarray(grad_var, float)), LEAST_VAR)
        groups = 1 if sqr is None else sqr.size
        return np.broadcast_to(self._factor(Facts(scale, sqr, var, progress, init_batch_size)), groups).copy()

    @abstractmethod
    def _factor(self, facts: Facts) -> Floats | float:
        """Return the factors from validated facts: (groups,), or one for all."""


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """Input of a rule for one step; None if unknown."""

    scale: float
    grad_sqr: Floats | None
    grad_var: Floats | None
    progress: float | None
    init_batch_size: float | None


class NoScaling(ScalingRule):
    """Factor 1: a constant learning rate at any batch."""

    def _factor(self, facts: Facts) -> float:
        del facts
        return 1.0


class LinearRule(ScalingRule):
    """Factor S: one step equals S small steps. Source: Goyal et al., arXiv:1706.02677."""

    def _factor(self, facts: Facts) -> float:
        return facts.scale


class SqrtRule(ScalingRule):
    """Factor sqrt(S): keeps the variance of an update constant. Source: Krizhevsky, arXiv:1404.5997."""

    def _factor(self, facts: Facts) -> float:
        return math.sqrt(facts.scale)


class LEGWRule(ScalingRule):
    """Factor sqrt(S) after a warm-up with S times as many steps. Source: LEGW, arXiv:1901.08256.

    The factor rises linearly over S x base_warmup_epochs x data_size / init_batch_size of progress.
    """

    def __init__(self, base_warmup_epochs: float, data_size: int) -> None:
        is_number = math.isfinite(base_warmup_epochs) and base_warmup_epochs >= 0
        require("base_warmup_epochs", base_warmup_epochs, is_number, "a number of 0 or more")
        require("data_size", data_size, data_size >= 1, "at least 1 sample")
        self._warmup_samples = base_warmup_epochs * data_size

    def _factor(self, facts: Facts) -> float:
        if facts.progress is None or facts.init_batch_size is None:
            raise ValueError("progress, init_batch_size: missing; LEGW's warm-up needs both")
        warmup_steps = facts.scale * self._warmup_samples / facts.init_batch_size
        warmed_up = min(1.0, facts.progress / warmup_steps) if warmup_steps > 0 else 1.0
        return math.sqrt(facts.scale) * warmed_up


class AdaScaleRule(ScalingRule):
    """Factor (var + sqr) / (var / S + sqr), from 1 to S. Source: AdaScale, arXiv:2007.05105."""

    rests_on_noise = True

    def _factor(self, facts: Facts) -> Floats:
        if facts.grad_sqr is None or facts.grad_var is None:
            raise ValueError("grad_sqr, grad_var: missing; get them from a GradientNoiseScale")
        signal, noise = facts.grad_sqr, facts.grad_var
        return np.asarray((noise + signal) / (noise / facts.scale + signal))


class AdamScaleRule(AdaScaleRule):
    """Square root of AdaScale's factor, for Adam and similar optimizers. Source: Pollux, arXiv:2008.12260."""

    def _factor(self, facts: Facts) -> Floats:
        return np.sqrt(super()._factor(facts))


RULES: Mapping[str, type[ScalingRule]] = {
    "adascale": AdaScaleRule,
    "adamscale": AdamScaleRule,
    "legw": LEGWRule,
    "linear": LinearRule,
    "none": NoScaling,
    "sqrt": SqrtRule,
}


class LearningRateScaling:
    """Scale a run's learning rate to the actual batch of each step.

    Per step: `decide`, train with `lr x lr_factor`, `count_groups`, and `observe` if there was an
    update. The decision uses earlier steps only, since a backend gets its learning rate before it computes a
    gradient. Progress and the rules that need the noise count the batch in informative groups, the other
    rules in prompts.
    """

    def __init__(self, rule: ScalingRule, init_batch_size: int, smoothing: float = 0.999) -> None:
        require("init_batch_size", init_batch_size, init_batch_size >= 1, "at least 1 prompt")
        self._rule = rule
        self._init_batch_size = init_batch_size
        self._noise = GradientNoiseScale(smoothing)
        self._groups = InformativeGroups(init_batch_size)
        self._progress = 0.0
        self._last_scale = 0.0  # of the previous update; 0 before the first

    def decide(self, batch_size: int) -> ScalingDecision:
        """Return the factor for a step of `batch_size` prompts."""
        scale = batch_size / self._init_batch_size
        effective = self._groups.effective_scale(scale)
        factor = self._rule.lr_factor(
            effective if self._rule.rests_on_noise else scale,
            grad_sqr=self._noise.sqr,
            grad_var=self._noise.var,
            progress=self._progress,
            init_batch_size=self._init_batch_size,
        )
        phi, gain = math.nan, self._noise.gain(effective)
        if self._noise.is_known:
            phi = self._noise.noise_scale * self._groups.per_initial_update / self._groups.share
        groups = "" if math.isclose(effective, scale, rel_tol=0.01) else f" (x{effective:.3g} informative)"
        noise = f"noise scale {phi:.3g} prompts" if math.isfinite(phi) else "noise but no signal measured"
        noise = "noise scale not yet known" if math.isnan(phi) else noise
        reason = f"batch x{scale:.3g}{groups}, {noise}: learning rate x{factor[0]:.3g}"
        return ScalingDecision(
            lr_factor=float(factor[0]),
            scale=scale,
            effective_scale=effective,
            gain=gain,
            progress=self._progress,
            noise_scale=phi,
            reason=reason,
        )

    def count_groups(self, informative: int, prompts: int) -> None:
        """Count the informative prompts of a step, even if none was."""
        self._groups.count(informative, prompts)

    def observe(
        self,
        decision: ScalingDecision,
        local_sqr_norms: Floats | None,
        mean_sqr_norm: Floats | None,
        *,
        informative: int | None = None,
        consecutive: bool = False,
    ) -> bool:
        """Count the step of `decision`, and update the noise scale from its gradients.

        Args:
            local_sqr_norms: (n, groups), of parts of the step: single informative prompt groups or
                several together. None if the backend cannot measure them; fewer than two are ignored.
            mean_sqr_norm: (groups,).
            informative: number of prompt groups in the gradient; None if the whole batch.
            consecutive: the parts are this step and the previous update. They are used only if both have
                the same scale, and if steps of several prompts have given no estimate yet: a step with
                only one informative group must not start a new average.

        Returns whether the noise scale was updated.
        """
        self._progress += decision.gain
        is_steady, self._last_scale = math.isclose(decision.scale, self._last_scale), decision.scale
        if local_sqr_norms is None or mean_sqr_norm is None or len(local_sqr_norms) < 2:
            return False
        is_single = round(decision.scale * self._init_batch_size) == 1
        may_pair = is_single or not self._noise.is_known or self._noise.is_consecutive
        if consecutive and not (is_steady and may_pair):
            return False
        local, mean = local_sqr_norms.sum(axis=1, keepdims=True), mean_sqr_norm.sum(keepdims=True)
        scale = decision.scale if informative is None else informative / self._groups.per_initial_update
        return self._noise.update(local, mean, scale, consecutive=consecutive)

    def state_dict(self) -> StateDict:
        return {
            "progress": self._progress,
            "last_scale": self._last_scale,
            "groups": self._groups.state_dict(),
            "noise": self._noise.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._progress = float(state["progress"])
        self._last_scale = float(state["last_scale"])
        self._groups.load_state_dict(state["groups"])
        self._noise.load_state_dict(state["noise"])


Schedule = Literal["constant", "linear", "cosine"]


def schedule_factor(schedule: Schedule, progress: float, total: float, warmup: float = 0.0) -> float:
    """Return the factor of the learning rate, in [0, 1].

    Args:
        schedule: constant, or decaying to zero at `total`, linearly or as half a cosine.
        progress: of all earlier steps; 0 for the first step.
        total: progress at which a decaying schedule reaches zero.
        warmup: progress over which the factor rises; above 0 from the first step.
    """
    rise = min(1.0, (progress + 1.0) / warmup) if warmup > 0 else 1.0
    done = min(1.0, progress / total)
    if schedule == "linear":
        return rise * (1.0 - done)
    if schedule == "cosine":
        return rise * 0.5 * (1.0 + math.cos(math.pi * done))
    return rise
