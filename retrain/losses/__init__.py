"""Policy losses as value and slope, so that every backend trains the same objective.

A plugin is one file or folder with `evaluate(logprobs, sampler_logprobs, advantages, sequence, *, <params>)`.
It returns each token's loss and the derivative of their *sum* with respect to each token's new
log-probability. A backend multiplies both by the token's weight (constant within a sequence) and
back-propagates `sum(weight * slope.detach() * logprob)`. This is the exact gradient, written once for
autograd and for hand-written gradients. A remote backend sends `Loss.name` and `Loss.params`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from retrain.registry import PluginSpec
from retrain.rollouts import Floats, LossTerms

SPEC = PluginSpec("loss", "evaluate", ("logprobs", "sampler_logprobs", "advantages", "sequence"))


if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class LossFunction(Protocol):
    """Flat arrays over completion tokens, shape (tokens,); `sequence` numbers each token's rollout."""

    def __call__(
        self,
        logprobs: Floats,
        sampler_logprobs: Floats,
        advantages: Floats,
        sequence: NDArray[np.int64],
        **params: Any,
    ) -> LossTerms: ...
