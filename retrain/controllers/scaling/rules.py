"""Learning-rate rules: the factor for one step whose batch is S times the initial one.

Decides by formula from S and the gradient's noise; refuses to guess a missing fact.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.controllers.scaling.informative import InformativeGroups
from retrain.controllers.scaling.noise_scale import LEAST_VAR, GradientNoiseScale
from retrain.rollouts import Floats


class ScalingRule(ABC):
    """Batch scale S -> one learning-rate factor per parameter group."""

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
            scale: S, this step's batch over the initial batch.
            grad_sqr: squared norm of the true gradient per group, raised to at least 0.
            grad_var: gradient variance at the initial batch size per group, raised to at least 1e-6.
            progress: steps at the initial batch that the steps so far were worth (see
                `GradientNoiseScale.gain`).
            init_batch_size: samples of the initial batch.

        Returns:
            Shape (groups,); (1,) if no group's gradient is given.

        Raises:
            ValueError: a fact that the rule needs is missing, or a number is out of range.
        """
        for name, value in (("scale", scale), ("init_batch_size", init_batch_size)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: got {value}; needs a finite number above 0")
        if progress is not None and not progress >= 0:
            raise ValueError(f"progress: got {progress}; needs a number of 0 or more")
        sqr = None if grad_sqr is None else np.maximum(np.atleast_1d(np.asarray(grad_sqr, float)), 0.0)
        var = None if grad_var is None else np.maximum(np.atleast_1d(np.asarray(grad_var, float)), LEAST_VAR)
        groups = 1 if sqr is None else sqr.size
        return np.broadcast_to(self._factor(Facts(scale, sqr, var, progress, init_batch_size)), groups).copy()

    @abstractmethod
    def _factor(self, facts: Facts) -> Floats | float:
        """Return the factor from facts in range: (groups,), or one for all."""


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What a rule may know of a step; None is not known."""

    scale: float
    grad_sqr: Floats | None
    grad_var: Floats | None
    progress: float | None
    init_batch_size: float | None


class NoScaling(ScalingRule):
    """Leaves the learning rate alone, whatever the batch."""

    def _factor(self, facts: Facts) -> float:
        del facts
        return 1.0


class LinearRule(ScalingRule):
    """S: as many small steps in one. Source: Goyal et al., arXiv:1706.02677."""

    def _factor(self, facts: Facts) -> float:
        return facts.scale


class SqrtRule(ScalingRule):
    """sqrt(S): keeps the variance of an update. Source: Krizhevsky, arXiv:1404.5997."""

    def _factor(self, facts: Facts) -> float:
        return math.sqrt(facts.scale)


class LEGWRule(ScalingRule):
    """sqrt(S) after a warm-up that is S times as long in steps. Source: LEGW, arXiv:1901.08256.

    The factor rises linearly over S x base_warmup_epochs x data_size / init_batch_size of progress.
    """

    def __init__(self, base_warmup_epochs: float, data_size: int) -> None:
        if not (math.isfinite(base_warmup_epochs) and base_warmup_epochs >= 0):
            raise ValueError(f"base_warmup_epochs: got {base_warmup_epochs}; needs a number of 0 or more")
        if data_size < 1:
            raise ValueError(f"data_size: got {data_size}; needs at least 1 sample")
        self._warmup_samples = base_warmup_epochs * data_size

    def _factor(self, facts: Facts) -> float:
        if facts.progress is None or facts.init_batch_size is None:
            raise ValueError("progress, init_batch_size: missing; LEGW's warm-up depends on both")
        warmup_steps = facts.scale * self._warmup_samples / facts.init_batch_size
        warmed_up = min(1.0, facts.progress / warmup_steps) if warmup_steps > 0 else 1.0
        return math.sqrt(facts.scale) * warmed_up


class AdaScaleRule(ScalingRule):
    """(var + sqr) / (var / S + sqr): S in pure noise, 1 without. Source: AdaScale, arXiv:2007.05105."""

    rests_on_noise = True

    def _factor(self, facts: Facts) -> Floats:
        if facts.grad_sqr is None or facts.grad_var is None:
            raise ValueError("grad_sqr, grad_var: missing; take them from a GradientNoiseScale")
        signal, noise = facts.grad_sqr, facts.grad_var
        factor: Floats = (noise + signal) / (noise / facts.scale + signal)
        return factor


class AdamScaleRule(AdaScaleRule):
    """AdaScale's square root, for Adam and kin. Source: Pollux, arXiv:2008.12260."""

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


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """The learning rate of one step and why."""

    lr_factor: float
    scale: float  # this step's batch over the initial batch, in prompts
    effective_scale: float  # the same in informative groups
    gain: float  # steps at the initial batch that this step is worth
    progress: float  # those of all steps before this one
    noise_scale: float  # prompts at which noise and signal balance; infinite without signal, NaN unknown
    reason: str


class LearningRateScaling:
    """Scales a run's one learning rate to the batch that each step really uses.

    Per step: `decide`, train with `lr x lr_factor`, `count_groups`, and `observe` if there was an
    update. The decision rests on the steps before, since a backend is told its learning rate before
    it computes a gradient. Rules that rest on the noise, and progress, take the batch for as large
    as it is in informative groups; the others, for as large as it is in prompts.
    """

    def __init__(self, rule: ScalingRule, init_batch_size: int, smoothing: float = 0.999) -> None:
        if init_batch_size < 1:
            raise ValueError(f"init_batch_size: got {init_batch_size}; needs at least 1 prompt")
        self._rule = rule
        self._init_batch_size = init_batch_size
        self._noise = GradientNoiseScale(smoothing)
        self._groups = InformativeGroups(init_batch_size)
        self._progress = 0.0
        self._last_scale = 0.0  # of the update before; 0 before any

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
        phi, gain = self._noise_scale(), self._noise.gain(effective)
        groups = "" if math.isclose(effective, scale, rel_tol=0.01) else f" (x{effective:.3g} informative)"
        reason = f"batch x{scale:.3g}{groups}, {_told(phi)}: learning rate x{factor[0]:.3g}"
        return ScalingDecision(float(factor[0]), scale, effective, gain, self._progress, phi, reason)

    def count_groups(self, informative: int, prompts: int) -> None:
        """Learn how many prompts of a step were informative, also if none was."""
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
        """Count the step that `decision` was for, and learn from its gradients.

        Args:
            local_sqr_norms: (n, groups), of parts of the step: informative prompt groups or
                numbers of them. None if the backend cannot tell; fewer than two teach nothing.
            mean_sqr_norm: (groups,).
            informative: prompt groups that the gradient rests on; None if all of the batch.
            consecutive: the parts are this step and the update before. That teaches only if both
                were of one scale, and if steps of several prompts have taught nothing yet: a step in
                which a single group happened to be informative must not start a new average.

        Returns:
            Whether it learned.
        """
        self._progress += decision.gain
        is_steady, self._last_scale = math.isclose(decision.scale, self._last_scale), decision.scale
        if local_sqr_norms is None or mean_sqr_norm is None or len(local_sqr_norms) < 2:
            return False
        if consecutive and not (is_steady and self._may_pair_steps(decision)):
            return False
        local, mean = local_sqr_norms.sum(axis=1, keepdims=True), mean_sqr_norm.sum(keepdims=True)
        scale = decision.scale if informative is None else informative / self._groups.per_initial_update
        return self._noise.update(local, mean, scale, consecutive=consecutive)

    def _noise_scale(self) -> float:
        """Noise scale in prompts; NaN before any estimate."""
        if not self._noise.is_known:
            return math.nan
        return self._noise.noise_scale * self._groups.per_initial_update / self._groups.share

    def _may_pair_steps(self, decision: ScalingDecision) -> bool:
        is_single = round(decision.scale * self._init_batch_size) == 1
        return is_single or not self._noise.is_known or self._noise.is_consecutive

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changes, as plain data."""
        return {
            "progress": self._progress,
            "last_scale": self._last_scale,
            "groups": self._groups.state_dict(),
            "noise": self._noise.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._progress = float(state["progress"])
        self._last_scale = float(state["last_scale"])
        self._groups.load_state_dict(state["groups"])
        self._noise.load_state_dict(state["noise"])


def _told(noise_scale: float) -> str:
    if math.isnan(noise_scale):
        return "noise scale not yet known"
    if math.isinf(noise_scale):
        return "noise but no signal measured"
    return f"noise scale {noise_scale:.3g} prompts"
