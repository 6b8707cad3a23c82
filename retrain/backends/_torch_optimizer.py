"""AdamW over a policy's trainable parameters, in float32 whatever they are stored in.

Gradients of the parts of a step are added up here, so that parts can be compared and bfloat16 never
sums them. Source: AdamW, arXiv:1711.05101; clipping, arXiv:1211.5063.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

BETAS, EPSILON = (0.9, 0.999), 1e-8  # Adam's, arXiv:1412.6980
MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Parameters, their float32 masters, and the running moments of their gradients."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], weight_decay: float) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        # a float32 parameter is its own master
        self._masters = [
            p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float())
            for p in self._parameters
        ]
        self._part: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._adam = torch.optim.AdamW(
            self._masters, lr=0.0, betas=BETAS, eps=EPSILON, weight_decay=weight_decay, fused=True
        )
        self.steps = 0

    def begin(self) -> None:
        """Forget all gradients."""
        self._part, self._sums = [], []
        for parameter in self._parameters:
            parameter.grad = None

    def collect(self) -> None:
        """Take the parameters' gradients, those of one micro-batch, into the part's."""
        self._part = _add(self._part, [_gradient(p) for p in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None

    def end_part(self) -> float:
        """Add the part's gradient to the step's.

        Returns:
            The squared norm of the part's gradient.
        """
        part, self._part = self._part, []
        squared = _squared_norm(part)
        self._sums = _add(self._sums, part)
        return squared

    def squared_norm(self) -> float:
        """Give the squared norm of the step's gradient so far."""
        return _squared_norm(self._sums)

    def non_finite(self) -> list[str]:
        """Name the parameters whose gradient is not finite."""
        pairs = zip(self._names, self._sums, strict=True)
        return [name for name, gradient in pairs if not torch.isfinite(gradient).all()]

    def step(self, lr: float, norm: float, max_norm: float) -> None:
        """Move the parameters downhill; a gradient longer than `max_norm` is shrunk to it first."""
        if norm > max_norm:
            torch._foreach_mul_(self._sums, max_norm / norm)
        for master, gradient in zip(self._masters, self._sums, strict=True):
            master.grad = gradient
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        for master in self._masters:
            master.grad = None
        self._write_back()
        self._sums = []
        self.steps += 1

    def state(self) -> dict[str, torch.Tensor]:
        """Give moments, and masters that are not the parameters themselves, by name."""
        tensors = {}
        for name, parameter, master in self._named():
            for moment in MOMENTS:
                kept = self._adam.state[master].get(moment)
                tensors[f"{moment}.{name}"] = torch.zeros_like(master.data) if kept is None else kept
            if master is not parameter:
                tensors[f"master.{name}"] = master.data
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def load(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Go on from what `state` gave after `steps` steps; the parameters are loaded already.

        Raises:
            KeyError: a tensor is missing.
        """
        self.steps = steps
        with torch.no_grad():
            for name, parameter, master in self._named():
                self._adam.state[master] = {
                    "step": torch.tensor(float(steps), device=master.device),
                    **{moment: tensors[f"{moment}.{name}"].to(master.device) for moment in MOMENTS},
                }
                if master is not parameter:
                    master.copy_(tensors[f"master.{name}"])
        self._write_back()

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
    """Give a float32 gradient; zero for a parameter that no token used."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=torch.float32)
    return parameter.grad.float()


def _squared_norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack(torch._foreach_norm(tensors)).double().square().sum())
