"""The loss of a micro-batch and its gradient, by autograd.

Losses are numpy functions that give value and slope per token; `sum(weight * slope * logprob)` with
slopes held constant has exactly the loss's gradient, so every loss runs on every device.
"""

from __future__ import annotations

import numpy as np
import torch

from retrain.backends import Optimization
from retrain.backends.kl import estimated_kl, with_kl
from retrain.backends.local.batches import MicroBatch
from retrain.backends.local.loading import Policy
from retrain.backends.local.logprobs import TokenLogprobs, token_logprobs
from retrain.backends.totals import Totals
from retrain.errors import NonFiniteError
from retrain.rollouts import Floats, Loss


def back_propagate(policy: Policy, batch: MicroBatch, loss: Loss, optimization: Optimization) -> Totals:
    """Add the gradient of a micro-batch's weighted loss to the parameters'.

    Raises:
        NonFiniteError: the loss is not finite; no gradient was added.
    """
    kl_coef = optimization.kl_coef
    reference = _reference(policy, batch, optimization.temperature) if kl_coef else None
    bonus = optimization.entropy_bonus
    found = evaluate(policy, batch, optimization.temperature, entropy_gradient=bonus > 0)
    logprobs = _to_numpy(found.logprobs)
    entropies = _to_numpy(found.entropies)
    terms = loss.evaluate(logprobs, batch.sampler_logprobs, batch.advantages, batch.sequence)
    apart = 0.0
    if reference is not None:
        terms = with_kl(terms, logprobs, reference, kl_coef)
        apart = estimated_kl(logprobs, reference)
    total = float(np.dot(batch.weights, terms.value) - bonus * np.dot(batch.bonus_weights, entropies))
    if not np.isfinite(total):
        raise NonFiniteError(
            f"the loss is {total}; the optimizer step was not taken, lower lr or check the rewards"
        )
    surrogate = torch.dot(_like(batch.weights * terms.slope, found.logprobs), found.logprobs)
    if bonus:
        surrogate = surrogate - bonus * torch.dot(
            _like(batch.bonus_weights, found.entropies), found.entropies
        )
    torch.autograd.backward([surrogate])
    return Totals(total, float(entropies.sum()), int(terms.clipped.sum()), len(logprobs), apart)


def evaluate(
    policy: Policy, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False
) -> TokenLogprobs:
    """Return log-probabilities and entropies of a micro-batch's completion tokens.

    Padding is on the right and attention looks left, so no mask is needed.
    """
    hidden = policy.body(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    return token_logprobs(
        policy.logits,
        hidden.flatten(0, 1)[batch.sources],
        batch.targets,
        temperature,
        vocabulary=policy.causal.config.get_text_config().vocab_size,
        entropy_gradient=entropy_gradient,
    )


def _reference(policy: Policy, batch: MicroBatch, temperature: float) -> Floats:
    with policy.as_reference():
        return _to_numpy(evaluate(policy, batch, temperature).logprobs)


def _to_numpy(tensor: torch.Tensor) -> Floats:
    array: Floats = tensor.detach().double().cpu().numpy()
    return array


def _like(values: Floats, tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=tensor.dtype, device=tensor.device)
