"""Log-probabilities of given tokens without storing all logits, shape (tokens, vocabulary)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

LOGITS_AT_A_TIME = 2**24  # numbers: 64 MiB in float32; far fewer already keep a GPU busy

Logits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log-probability and entropy (nats) per token, shape (tokens,), float32."""

    logprobs: torch.Tensor
    entropies: torch.Tensor


def token_logprobs(
    logits: Logits,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    *,
    vocabulary: int,
    entropy_gradient: bool = False,
) -> TokenLogprobs:
    """Evaluate targets (tokens,) under hidden states (tokens, width), in chunks of tokens.

    With gradients and more than one chunk, each chunk's logits are recomputed in the backward pass.

    Args:
        logits: hidden states -> float32 logits.
        temperature: divides the logits; 0 means 1.
        vocabulary: number of logits per token; determines the chunk size.
        entropy_gradient: also propagate gradients through the entropies.
    """

    def evaluate(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logp = log_distribution(logits(hidden), temperature)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies = entropy(logp)
        return logp.gather(1, targets[:, None])[:, 0], entropies

    size = max(1, LOGITS_AT_A_TIME // vocabulary)
    if len(targets) <= size:
        return TokenLogprobs(*evaluate(hidden, targets))
    pairs = zip(hidden.split(size), targets.split(size), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(evaluate, *p, use_reentrant=False, preserve_rng_state=False) for p in pairs]
    else:
        parts = [evaluate(*p) for p in pairs]
    return TokenLogprobs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def log_distribution(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Normalise logits at a temperature; 0 means 1."""
    return torch.log_softmax(logits if temperature in (0.0, 1.0) else logits / temperature, dim=-1)


def entropy(logp: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats of each log-distribution: (..., vocabulary) -> (...)."""
    return -(logp.exp() * logp).sum(-1)
