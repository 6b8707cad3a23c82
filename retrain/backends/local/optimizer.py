"""AdamW over a policy's trainable parameters, in float32 regardless of their dtype.

Gradients of a step's parts are summed here, so that parts can be compared and sums are never in
bfloat16. Source: AdamW, arXiv:1711.05101; clipping, arXiv:1211.5063.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from retrain.backends import GradientMoments
from retrain.backends.objective import moments_of
from retrain.base.errors import NonFiniteError
from retrain.base.rollouts import TrainingSample
from retrain.control.rules.scaling.rules import FIRST_SETTLED_STEP

BETAS, EPSILON = (0.9, 0.999), 1e-8  # Adam's, arXiv:1412.6980
MOMENTS = ("exp_avg", "exp_avg_sq")
PREVIOUS = "previous_gradient."  # prefix of the parameter's name


class Optimizer:
    """Parameters, their float32 master copies, and the running moments of their gradients."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], weight_decay: float) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        # a float32 parameter is its own master copy
        self._masters = [
            p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float())
            for p in self._parameters
        ]
        self._part: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._previous: list[torch.Tensor] = []  # gradient of a single-part step, for the next step's moments
        self._adam = torch.optim.AdamW(
            self._masters, lr=0.0, betas=BETAS, eps=EPSILON, weight_decay=weight_decay, fused=True
        )
        self.steps = 0

    def reset(self) -> None:
        """Clear moments and step count; keep parameters."""
        self.begin()
        self._adam.state.clear()
        self._previous = []
        self.steps = 0

    def begin(self) -> None:
        """Clear all gradients."""
        self._part, self._sums = [], []
        for parameter in (*self._parameters, *self._masters):
            parameter.grad = None

    def collect(self) -> None:
        """Move the gradients of one micro-batch from the parameters into the part's."""
        self._part = _add(self._part, [_gradient(p) for p in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None

    def end_part(self) -> None:
        """Add the part's gradient to the step's."""
        part, self._part = self._part, []
        self._sums = _add(self._sums, part)

    def part_norm(self) -> float:
        """Return the squared norm of the part's gradient so far, after Adam's preconditioning."""
        return self._norm_seen(self._part)

    def step(
        self,
        lr: float,
        max_norm: float,
        squares: Sequence[float],
        parts: Sequence[Sequence[TrainingSample]],
    ) -> tuple[float, GradientMoments | None]:
        """Update the parameters by the clipped gradient; return its norm before clipping, and the moments.

        `squares` are each part's `part_norm`; empty if moments are not wanted.
        """
        whole = _squared_norm(self._sums)
        if not np.isfinite(whole):
            pairs = zip(self._names, self._sums, strict=True)
            names = [name for name, gradient in pairs if not torch.isfinite(gradient).all()]
            raise NonFiniteError(
                f"the gradient of {', '.join(names[:3])} is not finite; the optimizer step was not taken, "
                "lower lr or check the rewards"
            )
        norm, moments, kept = float(np.sqrt(whole)), None, self._previous
        if squares and self.steps >= FIRST_SETTLED_STEP:
            moments = moments_of(squares, parts, self._sums, self._previous, self._norm_seen)
        if squares:
            kept = [gradient.clone() for gradient in self._sums] if len(squares) == 1 else []
        if norm > max_norm:
            torch._foreach_mul_(self._sums, max_norm / norm)
        self._adam_step(lr)
        self._write_back()
        self._previous, self._sums = kept, []
        self.steps += 1
        return norm, moments

    def _adam_step(self, lr: float) -> None:
        for master in self._masters:  # all or none: torch leaves a partial allocation when memory runs out
            if not self._adam.state[master]:
                self._adam.state[master] = {
                    "step": torch.zeros((), device=master.device),
                    **{moment: torch.zeros_like(master) for moment in MOMENTS},
                }
        for master, gradient in zip(self._masters, self._sums, strict=True):
            master.grad = gradient
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        for master in self._masters:
            master.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Return by name the moments, and the master copies that are not the parameters themselves."""
        tensors = {}
        for name, parameter, master in self._named():
            for moment in MOMENTS:
                kept = self._adam.state[master].get(moment)
                tensors[f"{moment}.{name}"] = torch.zeros_like(master.data) if kept is None else kept
            if master is not parameter:
                tensors[f"master.{name}"] = master.data
        if self._previous:
            tensors |= {PREVIOUS + n: g for n, g in zip(self._names, self._previous, strict=True)}
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def load(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Restore what `state` returned after `steps` steps; the parameters must be loaded already."""
        self.steps = steps
        with torch.no_grad():
            for name, parameter, master in self._named():
                moments = {moment: tensors[f"{moment}.{name}"].to(master.device) for moment in MOMENTS}
                if any(kept.shape != master.shape for kept in moments.values()):
                    raise ValueError(f"the moments of {name} do not have its shape")
                self._adam.state[master] = {
                    "step": torch.tensor(float(steps), device=master.device),
                    **moments,
                }
                if master is not parameter:
                    master.copy_(tensors[f"master.{name}"])
        self._previous = []
        if any(name.startswith(PREVIOUS) for name in tensors):
            pairs = zip(self._names, self._masters, strict=True)
            self._previous = [tensors[PREVIOUS + name].to(master.device) for name, master in pairs]
        self._write_back()

    def _norm_seen(self, gradients: Sequence[torch.Tensor]) -> float:
        """Return the squared norm of a gradient preconditioned as in Adam's update."""
        if self.steps < FIRST_SETTLED_STEP:
            return _squared_norm(list(gradients))
        correction = 1 - BETAS[1] ** self.steps
        total = 0.0
        for master, gradient in zip(self._masters, gradients, strict=True):
            root = (self._adam.state[master]["exp_avg_sq"] / correction).sqrt_().add_(EPSILON)
            total += float((gradient / root).double().square().sum())
        return total

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Parameter]]:
        return zip(self._names, self._parameters, self._masters, strict=True)

    def _write_back(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)


def _add(sums: list[torch.Tensor], more: list[torch.Tensor]) -> list[torch.Tensor]:
    if sums:
        torch._foreach_add_(sums, more)
    return sums or more


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a float32 gradient; zero if no token used the parameter."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=torch.float32)
    return parameter.grad.float()


def _squared_norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack(torch._foreach_norm(tensors)).double().square().sum())
