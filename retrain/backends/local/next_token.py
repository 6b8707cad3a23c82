"""Distributions of the next token: cut, drawn from with log-probabilities, and their entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from retrain.backends.local import LocalOptions

if TYPE_CHECKING:
    from retrain.backends.local.loading import Policy


@dataclass(frozen=True, slots=True)
class Cut:
    """Which tokens may be drawn: all conditions apply, in the order min_p, top_k, top_p."""

    top_p: float
    top_k: int
    min_p: float

    @classmethod
    def by(cls, options: LocalOptions) -> Cut | None:
        """Return the cut that options ask for; None if they cut nothing."""
        chosen = (options.top_p, options.top_k, options.min_p)
        return cls(*chosen) if chosen != (1.0, 0, 0.0) else None

    def of(self, logp: torch.Tensor) -> torch.Tensor:
        """Return log-distributions over the tokens that are left; -infinity for all others."""
        if self.min_p:
            logp = logp.masked_fill(logp < logp.amax(-1, keepdim=True) + math.log(self.min_p), -math.inf)
        if 0 < self.top_k < logp.shape[-1]:
            logp = logp.masked_fill(logp < logp.topk(self.top_k).values[..., -1:], -math.inf)
        logp = torch.log_softmax(logp, dim=-1)
        if self.top_p < 1:
            ordered, places = logp.sort(descending=True, dim=-1)
            weights = ordered.exp()
            unlikely = weights.cumsum(-1) - weights >= self.top_p  # what is before a token suffices
            ordered = torch.log_softmax(ordered.masked_fill(unlikely, -math.inf), dim=-1)
            logp = torch.empty_like(logp).scatter_(-1, places, ordered)
        return logp


def entropy(logp: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats of each log-distribution: (..., vocabulary) -> (...)."""
    return -(logp.exp() * logp).sum(-1)


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
    size = policy.rows_at_a_time
    parts = zip(hidden.split(size), numbers.split(size), strict=True)
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
