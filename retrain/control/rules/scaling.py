"""Learning rate and batch size: scaling rules and schedules, the gradient noise scale, and goodput.

Each rule is a formula of S, the step's batch over the initial batch, and the gradient noise; a missing
argument is an error. The noise scale is the noise of a step's gradient relative to its signal, computed from
squared norms alone, so that any framework can measure them; a single norm tells nothing about noise. Goodput,
useful samples per second, is for choosing a batch that is fast and sample-efficient; source: Pollux,
arXiv:2008.12260.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules import StateDict, require
from retrain.records.step_row import ScalingDecision

Numbers: TypeAlias = Floats | float  # arguments that broadcast


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
        may_pair = is_single or not self._noise.is_known or self._noise.consecutive
        if consecutive and not (is_steady and may_pair):
            return False
        local, mean = local_sqr_norms.sum(axis=1, keepdims=True), mean_sqr_norm.sum(keepdims=True)
        scale = decision.scale if informative is None else informative / self._groups.per_initial_update
        return self._noise.update(local, mean, scale, consecutive=consecutive)

    def state_dict(self) -> StateDict:
        return {
            "progress": self._progress,
            "last_scale": self._last_scale,
            "groups": {"sum": self._groups.sum, "weight": self._groups.weight},
            "noise": self._noise.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._progress = float(state["progress"])
        self._last_scale = float(state["last_scale"])
        self._groups = InformativeGroups(self._init_batch_size, **state["groups"])
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
        self.consecutive = False  # kind of the estimates averaged so far
        self._weight = 0.0  # sum of the average's weights; 0 before any estimate
        self._sqr: Floats = np.zeros(0)
        self._var: Floats = np.zeros(0)

    @property
    def is_known(self) -> bool:
        return self._weight > 0

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
        local = np.asarray(local_sqr_norms, dtype=np.float64)
        mean = np.asarray(mean_sqr_norm, dtype=np.float64)
        shapes, fit = (local.shape, mean.shape), local.ndim == 2 and local.shape[1:] == mean.shape
        require("shapes of local_sqr_norms and mean_sqr_norm", shapes, fit, "(n, groups) and (groups,)")
        enough = (
            "at least 2 parts, because one norm cannot show noise; pair it with the previous step's gradient "
            "and pass consecutive=True"
        )
        require("local_sqr_norms", len(local), len(local) >= 2, enough)
        require("scale", scale, math.isfinite(scale) and scale > 0, "a finite number above 0")
        if not (np.isfinite(local).all() and np.isfinite(mean).all()):
            return False
        n, together = len(local), scale * (2 if consecutive else 1)
        sqr = (n * mean - local.mean(axis=0)) / (n - 1)
        var = (local.mean(axis=0) - mean) * together / (n - 1)
        if not self.is_known or consecutive != self.consecutive:
            self.consecutive, self._weight = consecutive, 0.0
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
            "consecutive": self.consecutive,
            "weight": self._weight,
            "sqr": self._sqr.tolist(),
            "var": self._var.tolist(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._smoothing = float(state["smoothing"])
        self.consecutive = bool(state["consecutive"])
        self._weight = float(state["weight"])
        self._sqr = np.array(state["sqr"], dtype=np.float64)
        self._var = np.array(state["var"], dtype=np.float64)


@dataclass
class InformativeGroups:
    """Moving average of the fraction of prompts whose group is informative.

    A prompt whose rollouts all have the same reward has no gradient; a batch of only such prompts makes no
    update. As fewer groups are informative, small batches skip more updates, while large batches still make
    every update from fewer groups: an eight times larger batch then has less than eight times the informative
    groups per update.
    """

    init_batch_size: int
    sum: float = 0.0
    weight: float = 0.0  # 0 before any step

    @property
    def share(self) -> float:
        """Fraction of informative prompts; 1 before the first step."""
        return min(1.0, max(LEAST_SHARE, self.sum / self.weight)) if self.weight else 1.0

    @property
    def per_initial_update(self) -> float:
        """Mean number of informative groups in initial batches that have at least one."""
        return self.init_batch_size * self.share / self._update_share(1.0)

    def count(self, informative: int, prompts: int) -> None:
        """Count the groups of a step, with or without an update."""
        keep = SHARE_SMOOTHING ** (prompts / self.init_batch_size)
        self.sum = keep * self.sum + (1 - keep) * informative / prompts
        self.weight = keep * self.weight + (1 - keep)

    def effective_scale(self, scale: float) -> float:
        """Return the informative groups per update of `scale` initial batches, relative to one initial batch.

        Equals the number of updates that the same prompts would have made in initial batches: `scale` if
        every group is informative, 1 if hardly any is.
        """
        return scale * self._update_share(1.0) / self._update_share(scale)

    def _update_share(self, scale: float) -> float:
        """Return the probability that a batch of `scale` initial batches has an informative group."""
        if self.share == 1.0:
            return 1.0
        return -math.expm1(scale * self.init_batch_size * math.log1p(-self.share))


TINY = 1e-8  # seconds; stands for a time that was never measured
ROUNDING = 1e-8  # geomspace may end a hair above a whole number
CANDIDATES = 50  # total batch sizes evaluated, log-spaced: neighbours differ by a few percent


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Throughput model: seconds per step as a function of replicas and samples."""

    alpha_c: float  # s, constant compute time of one pass
    beta_c: float  # s per sample, compute time of one pass on one replica
    alpha_n: float  # s, network between nodes
    beta_n: float  # s per replica beyond two, between nodes
    alpha_r: float  # s, network within a node
    beta_r: float  # s per replica beyond two, within a node
    gamma: float  # 1 (no overlap of compute and network) to 10 (nearly full)

    def pass_s(self, atomic_batch: Numbers) -> Floats:
        """Return the seconds of one forward and backward pass of `atomic_batch` samples on each replica."""
        return self.alpha_c + self.beta_c * np.asarray(atomic_batch, dtype=np.float64)

    def network_s(self, nodes: Numbers, replicas: Numbers) -> Floats:
        """Return the seconds to average gradients over `replicas` on `nodes`."""
        where = [np.greater(nodes, 1), np.greater(replicas, 1)]
        base = np.select(where, [self.alpha_n, self.alpha_r], TINY)
        each = np.select(where, [self.beta_n, self.beta_r], TINY)
        return np.asarray(base + each * np.maximum(np.subtract(replicas, 2), TINY))

    def last_pass_s(self, nodes: Numbers, replicas: Numbers, atomic_batch: Numbers) -> Floats:
        """Return the seconds of a step's last pass, whose network time overlaps its compute."""
        compute, network = self.pass_s(atomic_batch), self.network_s(nodes, replicas)
        longest = np.maximum(compute, network)  # factored out, because large powers underflow
        parts = (compute / longest) ** self.gamma + (network / longest) ** self.gamma
        return np.asarray(longest * parts ** (1 / self.gamma))

    def throughput(
        self, nodes: Numbers, replicas: Numbers, atomic_batch: Numbers, accumulation_steps: Numbers
    ) -> Floats:
        """Return samples per second; `accumulation_steps` passes without network precede the last."""
        samples = np.multiply(replicas, atomic_batch) * np.add(accumulation_steps, 1)
        before = accumulation_steps * self.pass_s(atomic_batch)
        return np.asarray(samples / (before + self.last_pass_s(nodes, replicas, atomic_batch)))


def efficiency(batch_size: Numbers, *, phi: float, init_batch_size: float) -> Floats:
    """Return progress per sample at `batch_size`, relative to the initial batch: (phi + M0) / (phi + M)."""
    sizes = np.asarray(batch_size, dtype=np.float64)
    return np.ones_like(sizes) if math.isinf(phi) else (phi + init_batch_size) / (phi + sizes)


@dataclass(frozen=True, slots=True)
class BatchSuggestion:
    """The suggested batch of each replica, and its expected goodput."""

    atomic_batch: int  # samples of one pass on one replica
    accumulation_steps: int  # passes before the last
    goodput: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Throughput times efficiency."""

    times: StepTimes
    phi: float  # gradient noise scale, samples
    init_batch_size: int

    def evaluate(
        self, nodes: Numbers, replicas: Numbers, atomic_batch: Numbers, accumulation_steps: Numbers
    ) -> Floats:
        """Return useful samples per second; arguments broadcast."""
        batch = np.multiply(replicas, atomic_batch) * np.add(accumulation_steps, 1)
        gained = efficiency(batch, phi=self.phi, init_batch_size=self.init_batch_size)
        return self.times.throughput(nodes, replicas, atomic_batch, accumulation_steps) * gained

    def suggest(
        self,
        nodes: int,
        replicas: int,
        *,
        max_batch_size: int | None = None,
        atomic_limits: tuple[int, int] | None = None,
        accumulation: bool = False,
    ) -> BatchSuggestion:
        """Return the batch with the highest goodput, at least the initial batch.

        A single replica needs two passes to separate noise from signal: beyond the initial batch it
        accumulates, and without `accumulation` it stays at the initial batch.

        Args:
            max_batch_size: total samples of a step, rounded up to whole samples per replica;
                default the initial batch.
            atomic_limits: fewest and most samples of one pass; default 1 and `max_batch_size`.
            accumulation: whether a step may take several passes.

        Raises:
            ValueError: no batch fits the limits.
        """
        most = self.init_batch_size if max_batch_size is None else max_batch_size
        lowest, highest = atomic_limits or (1, most)
        least = max(self.init_batch_size, lowest * replicas)
        reach = most if accumulation else min(most, highest * replicas)
        if not (1 <= lowest <= highest and 1 <= nodes <= replicas and least <= reach):
            raise ValueError(
                f"max_batch_size={most}, atomic_limits=({lowest}, {highest}), replicas={replicas}, "
                f"nodes={nodes}, accumulation={accumulation}: no batch fits; a step needs at least {least} "
                "samples and each node a replica"
            )
        share = np.geomspace(least, most, CANDIDATES) / replicas
        atomic, passes = np.ceil(share - ROUNDING), np.ones_like(share)
        if accumulation:
            passes = np.ceil(share / highest - ROUNDING)
            if replicas == 1:
                is_larger = share > self.init_batch_size + ROUNDING
                passes = np.where(is_larger, np.maximum(passes, 2), passes)
            atomic = np.ceil(share / passes - ROUNDING)
        elif replicas == 1:
            atomic = np.full_like(share, self.init_batch_size)
        atomic = np.clip(atomic, lowest, highest)
        useful = self.evaluate(nodes, replicas, atomic, passes - 1)
        best = int(np.argmax(useful))
        return BatchSuggestion(int(atomic[best]), int(passes[best]) - 1, float(useful[best]))
