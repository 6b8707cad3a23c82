"""Measure the input of the gradient noise scale from a PyTorch model's backward passes.

Gradients are not kept, except those of one step if a step has a single part.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules.scaling.rules import FIRST_SETTLED_STEP

if TYPE_CHECKING:
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
        """Divide the accumulated gradients by the number of passes."""
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
            each = self._sums_over_replicas() * (self.passes**2 if divided else 1) / parts
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
        divisor = self._preconditioner(number, parameter)
        scaled = gradient.detach().float() if divisor is None else gradient.detach().float() / divisor
        return scaled.square().sum()

    def _preconditioner(self, number: int, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return Adam's divisor of this parameter's update; None without Adam, or before its step 5."""
        state, group = self._optimizer.state.get(parameter, {}), self._optimizer.param_groups[number]
        steps = float(state.get("step", 0))
        if "exp_avg_sq" not in state or steps < FIRST_SETTLED_STEP:
            return None
        corrected = state["exp_avg_sq"] / (1 - group["betas"][1] ** steps)
        root: torch.Tensor = corrected.sqrt() + group["eps"]
        return root

    def _sqr_norms(self, gradients: list[list[torch.Tensor]]) -> Floats:
        """Return the squared norm per parameter group: (groups,)."""
        norms = [
            sum(float(self._sqr_norm(i, p, g)) for p, g in zip(self._groups[i], group, strict=True))
            for i, group in enumerate(gradients)
        ]
        return np.array(norms)

    def _sums_over_replicas(self) -> Floats:
        """Return each group's squared norms, summed over passes and replicas: (groups,)."""
        device = next(p.device for group in self._groups for p in group)
        sums = self.torch.stack([self.torch.as_tensor(s, device=device).float() for s in self._sqr_sums])
        if self.replicas > 1:
            self.torch.distributed.all_reduce(sums, group=self._process_group)
        return np.array(sums.tolist())


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.new_zeros(parameter.shape) if parameter.grad is None else parameter.grad.detach()
