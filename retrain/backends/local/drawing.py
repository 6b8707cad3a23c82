"""Tokens drawn from the policy's distribution, with their log-probabilities in it."""

from __future__ import annotations

import torch

from retrain.backends.local.loading import Cut, Policy

LOGITS_AT_A_TIME = 2**24  # numbers: 64 MiB in float32


def draw(
    policy: Policy,
    hidden: torch.Tensor,
    temperature: float,
    numbers: torch.Tensor,
    cut: Cut | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a token of each row, its log-probability, and the entropy of its distribution.

    `numbers`, (rows,) uniform in [0, 1), choose the token by inverting the cumulative distribution.
    """
    at_a_time = max(1, LOGITS_AT_A_TIME // policy.causal.config.get_text_config().vocab_size)
    parts = zip(hidden.split(at_a_time), numbers.split(at_a_time), strict=True)
    drawn = [
        _draw(policy.log_distribution(states, temperature, cut), temperature, part, is_cut=cut is not None)
        for states, part in parts
    ]
    tokens, logprobs, entropies = (torch.cat(column) for column in zip(*drawn, strict=True))
    return tokens, logprobs, entropies


def _draw(
    logp: torch.Tensor, temperature: float, numbers: torch.Tensor, *, is_cut: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights = logp.exp()
    if temperature == 0:
        tokens = logp.argmax(-1)
    else:
        # in float32, the sum of a large vocabulary would hide rare tokens
        bounds = weights.cumsum(-1, dtype=torch.float64)
        chosen = torch.searchsorted(bounds, numbers[:, None] * bounds[:, -1:], right=True)[:, 0]
        tokens = chosen.clamp_(max=logp.shape[-1] - 1)
    logprobs = logp.gather(1, tokens[:, None])[:, 0]
    if is_cut:
        logp = logp.masked_fill(weights == 0, 0.0)  # 0 log 0 is 0
    return tokens, logprobs, -(weights * logp).sum(-1)
