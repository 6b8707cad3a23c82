"""Learning-rate scaling for your own PyTorch loop.

    rule = AdaScale()
    rule.initialize(model, optimizer)      # plain model or DistributedDataParallel
    for batch in batches:
        loss(model, batch).backward()      # once, or several times to accumulate
        rule.step()
        rule.zero_grad()

Each backward pass must be of the mean loss over its own micro-batch; `step` averages the passes. The
optimizer's learning rates are restored after each step, so a scheduler sets them for the initial
batch; schedule by `rule.progress` instead of steps. Before `initialize` the same objects compute
factors from numbers, without PyTorch.

Sharded models are not supported, because no process holds a whole gradient. A gradient scaler for
float16 is not supported, because it rescales gradients between the passes and the step.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules import StateDict
from retrain.control.rules.scaling import (
    FIRST_SETTLED_STEP,
    AdamScaleRule,
    AdaScaleRule,
    Facts,
    GradientNoiseScale,
    LEGWRule,
    LinearRule,
    ScalingRule,
    SqrtRule,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class Gradients:
    """Measure each backward pass of a model with hooks, before replicas are averaged.

    A hook on a parameter gets the gradient of the pass, before accumulation and before averaging
    over replicas.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        try:
            import torch
            from torch.nn.parallel import DistributedDataParallel
        except ImportError as error:
            raise ImportError("initialize needs PyTorch: pip install torch") from error
        self.torch = torch
        # wrappers that split parameters; only modules already imported can be in the model
        fsdp, tensors = (sys.modules.get(f"torch.distributed.{name}") for name in ("fsdp", "tensor"))
        is_wrapped = fsdp and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in model.modules())
        if is_wrapped or (tensors and any(isinstance(p, tensors.DTensor) for p in model.parameters())):
            raise ValueError(
                "model: is sharded (FSDP or DTensor), so no process holds a whole gradient; "
                "use DistributedDataParallel"
            )
        if isinstance(optimizer, self.torch.optim.LBFGS):
            raise ValueError("optimizer: LBFGS computes several gradients per step; use another optimizer")
        self._optimizer = optimizer
        distributed = isinstance(model, DistributedDataParallel)
        self._process_group = model.process_group if distributed else None
        self.replicas = torch.distributed.get_world_size(self._process_group) if distributed else 1
        self._groups = [[p for p in g["params"] if p.requires_grad] for g in optimizer.param_groups]
        self._previous: tuple[float, list[list[torch.Tensor]]] | None = None
        self.forget()
        self._hooks = [
            parameter.register_hook(partial(self._watch, number, parameter))
            for number, group in enumerate(self._groups)
            for parameter in group
        ]

    @property
    def passes(self) -> int:
        """Backward passes since the last `forget`: the maximum over parameters.

        Counting autograd runs instead would count reentrant checkpoints as passes.
        """
        return max(self._seen.values(), default=0)

    def misses_parameters(self) -> bool:
        """Whether the optimizer trains parameters that were added or unfrozen after the hooks were set."""
        watched = {parameter for group in self._groups for parameter in group}
        trained = (p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad)
        return not watched.issuperset(trained)

    def forget(self) -> None:
        """Start a new step."""
        self._seen: dict[torch.Tensor, int] = {}
        self._sqr_sums: list[torch.Tensor | float] = [0.0] * len(self._groups)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def average(self, passes: int) -> None:
        for group in self._groups:
            for parameter in group:
                if parameter.grad is not None and passes > 1:
                    parameter.grad.div_(passes)

    def moments(self, scale: float, *, divided: bool) -> tuple[Floats, Floats, bool] | None:
        """Return (parts' squared norms, their mean's, whether parts are consecutive steps).

        None if this step has a single part and no previous step of the same scale.
        """
        means = [[_gradient(p) for p in group] for group in self._groups]
        parts = self.passes * self.replicas
        if parts > 1:
            self._previous = None
            # Losses divided by the number of passes have gradients smaller by that factor.
            device = next(p.device for group in self._groups for p in group)
            sums = self.torch.stack([self.torch.as_tensor(s, device=device).float() for s in self._sqr_sums])
            if self.replicas > 1:
                self.torch.distributed.all_reduce(sums, group=self._process_group)
            each = np.array(sums.tolist()) * (self.passes**2 if divided else 1) / parts
            return np.broadcast_to(each, (parts, each.size)), self._sqr_norms(means), False
        earlier, self._previous = self._previous, (scale, [[g.clone() for g in group] for group in means])
        if earlier is None or not math.isclose(earlier[0], scale):
            return None
        local = np.stack([self._sqr_norms(earlier[1]), self._sqr_norms(means)])
        halfway = [
            [(before + after) / 2 for before, after in zip(*group, strict=True)]
            for group in zip(earlier[1], means, strict=True)
        ]
        return local, self._sqr_norms(halfway), True

    def _watch(self, number: int, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self._seen[parameter] = self._seen.get(parameter, 0) + 1
        self._sqr_sums[number] = self._sqr_sums[number] + self._sqr_norm(number, parameter, gradient)

    def _sqr_norm(self, number: int, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Return the squared norm of a gradient, with Adam over its divisor of the parameter's update."""
        state, group = self._optimizer.state.get(parameter, {}), self._optimizer.param_groups[number]
        steps, scaled = float(state.get("step", 0)), gradient.detach().float()
        if "exp_avg_sq" in state and steps >= FIRST_SETTLED_STEP:
            corrected = state["exp_avg_sq"] / (1 - group["betas"][1] ** steps)
            scaled = scaled / (corrected.sqrt() + group["eps"])
        return scaled.square().sum()

    def _sqr_norms(self, gradients: list[list[torch.Tensor]]) -> Floats:
        """Return the squared norm per parameter group: (groups,)."""
        norms = [
            sum(float(self._sqr_norm(i, p, g)) for p, g in zip(self._groups[i], group, strict=True))
            for i, group in enumerate(gradients)
        ]
        return np.array(norms)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.new_zeros(parameter.shape) if parameter.grad is None else parameter.grad.detach()


class ScalingRuleBase(ScalingRule):
    """A rule that attaches to a model and its optimizer; define `scale_lr` for a custom rule."""

    _gradients: Gradients | None = None
    _init_batch_size: float | None = None
    accum_scale = 1.0
    progress = 0.0  # steps so far, in equivalent steps at the initial batch
    noise = GradientNoiseScale()  # before `initialize`: nothing measured; replaced by it, never updated
    _is_inside = False  # during our own call, in which a patched optimizer runs its original method

    def initialize(
        self,
        adp: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        patch_optimizer: bool = False,
        *,
        accum_scale: float | None = None,
        init_batch_size: float | None = None,
        losses_are_divided: bool = False,
        smoothing: float = 0.999,
    ) -> None:
        """Attach to the model's gradients; a second call detaches the first model.

        Args:
            adp: the model: plain, DistributedDataParallel, whose replicas then count as parts, or
                AdaptiveDataParallel, whose rule this becomes.
            optimizer: over the model's parameters; if it keeps Adam's second moment, gradients
                are measured after division by its root.
            patch_optimizer: redirect the optimizer's `step` and `zero_grad` to the rule's until `detach`,
                for a loop that calls the optimizer.
            accum_scale: samples of one backward pass, over all replicas, per initial batch;
                default the number of replicas. Set `rule.accum_scale` when the batch changes.
            init_batch_size: samples of the initial batch; needed by `LEGWScale` only.
            losses_are_divided: each loss is already divided by the number of accumulated passes, as
                usual in PyTorch, so `step` does not average.
            smoothing: weight of the old noise estimate, per step at the initial batch.

        Raises:
            ImportError: PyTorch is not installed.
            ValueError: a parameter is out of range, an argument that the rule needs is missing, or
                the model is sharded.
        """
        self.detach()
        model = adp
        parallel = sys.modules.get(f"{__name__}.data_parallel")  # not imported here: it needs PyTorch
        if parallel is not None and isinstance(adp, parallel.AdaptiveDataParallel):
            if adp.scaling_rule is not self:
                adp.scaling_rule.detach()
            adp.scaling_rule, model = self, adp.module
        gradients = Gradients(model, optimizer)
        self.accum_scale = float(gradients.replicas if accum_scale is None else accum_scale)
        self.progress = 0.0
        self.noise = GradientNoiseScale(smoothing)
        self.optimizer, self._init_batch_size = optimizer, init_batch_size
        self._losses_are_divided = losses_are_divided
        self._gradients = gradients
        try:
            self._factors(self.accum_scale)  # raises now, not at the first step, if an argument is missing
        except (ValueError, NotImplementedError):
            self.detach()
            raise
        if patch_optimizer:
            self._patch(gradients)

    def scale_lr(self, scale: float) -> Floats | float:
        """Return one learning-rate factor per parameter group, for a batch of `scale` initial ones.

        Define it in a subclass for a custom rule; the measurements are in `self.noise` and
        `self.progress`. A single number applies to all groups. Before `initialize` nothing is measured, and
        there is one group.
        """
        groups = len(self.optimizer.param_groups) if self._gradients else 1
        return self.lr_factor(
            scale,
            grad_sqr=np.broadcast_to(self.noise.sqr, groups),
            grad_var=np.broadcast_to(self.noise.var, groups),
            progress=self.progress,
            init_batch_size=self._init_batch_size,
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step at scaled learning rates, which are restored afterwards.

        Args:
            closure: computes the loss and its gradients and returns the loss; called once, before the step.

        Returns:
            The closure's result; None without a closure.

        Raises:
            RuntimeError: not initialized, no backward pass since the last step, or the optimizer
                trains parameters added or unfrozen after `initialize`.
        """
        gradients = self._attached()
        loss = None if closure is None else gradients.torch.enable_grad()(closure)()
        if gradients.misses_parameters():
            raise RuntimeError(
                "the optimizer trains parameters added or unfrozen after initialize(); call it again, and "
                "then restore `rule.progress`"
            )
        passes = gradients.passes
        if passes == 0:
            raise RuntimeError(
                "step() without a backward pass since the last step; call loss.backward() first"
            )
        if not self._losses_are_divided:
            gradients.average(passes)
        scale = self.accum_scale * passes
        moments = gradients.moments(scale, divided=self._losses_are_divided)
        if moments is not None:
            local, mean, consecutive = moments
            self.noise.update(local, mean, scale, consecutive=consecutive)
        groups, factors = self.optimizer.param_groups, self._factors(scale)
        rates = [group["lr"] for group in groups]
        try:
            for group, factor in zip(groups, factors, strict=True):
                group["lr"] = group["lr"] * float(factor)
            with self._inside():
                self.optimizer.step()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate  # the same object
        self.progress += self.noise.gain(scale)
        gradients.forget()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients and their measurements."""
        gradients = self._attached()
        with self._inside():
            self.optimizer.zero_grad(set_to_none=set_to_none)
        gradients.forget()

    def detach(self) -> None:
        """Detach from the model's gradients; safe to call at any time."""
        if self._gradients is not None:
            self._gradients.close()
            self._gradients = None

    def state_dict(self) -> StateDict:
        """Return progress and noise estimate as plain data.

        The last gradient is not included: with one part per step, the first step after a resume
        gives no estimate.
        """
        self._attached()
        return {"progress": self.progress, "noise": self.noise.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a `state_dict`, after `initialize`."""
        self._attached()
        self.progress = float(state["progress"])
        self.noise.load_state_dict(state["noise"])

    def _attached(self) -> Gradients:
        if self._gradients is None:
            raise RuntimeError(
                f"{type(self).__name__} is not attached; call initialize(model, optimizer) first"
            )
        return self._gradients

    def _factors(self, scale: float) -> Floats:
        return np.broadcast_to(np.asarray(self.scale_lr(scale), float), len(self.optimizer.param_groups))

    def _factor(self, facts: Facts) -> Floats | float:
        if type(self).scale_lr is ScalingRuleBase.scale_lr:
            raise NotImplementedError(f"{type(self).__name__}: define scale_lr(self, scale)")
        return self.scale_lr(facts.scale)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _patch(self, gradients: Gradients) -> None:
        """Redirect the optimizer's `step` and `zero_grad` to ours while these gradients are attached."""
        optimizer = self.optimizer

        def lead(plain: Callable[..., Any], ours: Callable[..., Any]) -> MethodType:
            @functools.wraps(plain)
            def method(_: object, *args: Any, **kwargs: Any) -> Any:
                is_ours = self._gradients is gradients and not self._is_inside
                return (ours if is_ours else plain)(*args, **kwargs)

            return MethodType(method, optimizer)  # learning-rate schedulers wrap methods only

        optimizer.step = lead(optimizer.step, self.step)
        optimizer.zero_grad = lead(optimizer.zero_grad, self.zero_grad)


class AdaScale(AdaScaleRule, ScalingRuleBase):
    """Learning rate by gradient noise, for SGD (see `AdaScaleRule`)."""


class AdamScale(AdamScaleRule, ScalingRuleBase):
    """Learning rate by gradient noise, for Adam and similar optimizers (see `AdamScaleRule`)."""


class LEGWScale(LEGWRule, ScalingRuleBase):
    """Square root, with a warm-up that grows with the batch (see `LEGWRule`)."""


class LinearScale(LinearRule, ScalingRuleBase):
    """Learning rate in proportion to the batch (see `LinearRule`)."""


class SqrtScale(SqrtRule, ScalingRuleBase):
    """Learning rate in proportion to the square root of the batch (see `SqrtRule`)."""
