"""A model with its optimizer and learning-rate rule, in one process or over replicas."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from retrain.trainer.torch_scaling import AdaScale, ScalingRuleBase


class AdaptiveDataParallel(torch.nn.Module):  # type: ignore[misc]  # PyTorch may not be installed
    """Wrap a model so that its optimizer steps at learning rates that a rule scales.

        rule = AdaScale()
        model = AdaptiveDataParallel(model, optimizer, rule)
        for batch in batches:
            optimizer.zero_grad()
            loss(model, batch).backward()
            rule.step()                    # or optimizer.step()

    Args:
        model: plain, which is replicated where torch.distributed is initialized; or DistributedDataParallel.
        optimizer: over the model's parameters; its `step` and `zero_grad` become the rule's. None: call
            `rule.initialize(adp, optimizer)` later.
        lr_scheduler: kept as an attribute; or the rule.
        mp_scaler: not supported.
        scaling_rule: default AdaScale.
        name: not used; there for loops written for the published class.
        kwargs: those of DistributedDataParallel, where the model is replicated.

    Raises:
        ValueError: there is a gradient scaler, or the rule refuses the model or the optimizer.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: Any = None,
        mp_scaler: Any = None,
        scaling_rule: ScalingRuleBase | None = None,
        name: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if mp_scaler is not None:
            raise ValueError(
                "mp_scaler: a gradient scaler rescales gradients between passes and step; use bfloat16"
            )
        if isinstance(lr_scheduler, ScalingRuleBase):
            lr_scheduler, scaling_rule = None, lr_scheduler
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if distributed and not isinstance(model, DistributedDataParallel):
            model = DistributedDataParallel(model, **kwargs)
        object.__setattr__(self, "replicated", model)  # no part, so `state_dict` has no names of it
        self.module = model.module if isinstance(model, DistributedDataParallel) else model
        self.lr_scheduler, self.name = lr_scheduler, name
        self.scaling_rule = scaling_rule or AdaScale()
        if optimizer is not None:
            self.scaling_rule.initialize(self, optimizer, patch_optimizer=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.replicated(*args, **kwargs)

    @property
    def gain(self) -> float:
        """Steps at the initial batch that a pass of every replica equals."""
        return self.scaling_rule.noise.gain(self.scaling_rule.accum_scale)
