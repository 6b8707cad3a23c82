"""Policy losses as value and slope, so that every backend trains the same objective.

A plugin is one file or folder with `evaluate(logprobs, sampler_logprobs, advantages, sequence, *, <params>)`.
Its arrays are flat over completion tokens, shape (tokens,); `sequence` numbers each token's rollout. It
returns each token's loss and the derivative of their *sum* with respect to each token's new log-probability
(`LossTerms`); different shapes are a ValueError. A backend multiplies both by the token's weight (constant
within a sequence) and back-propagates `sum(weight * slope.detach() * logprob)`. This is the exact gradient,
written once for autograd and for hand-written gradients. A remote backend sends a loss's name and parameters.
"""

from __future__ import annotations

from retrain.base.registry import PluginSpec

SPEC = PluginSpec(
    "loss", "evaluate", ("logprobs", "sampler_logprobs", "advantages", "sequence"), has_defaults=True
)
