"""Statistics of an optimizer step from the API's log-probabilities, with consistency checks.

The API's loss is compared with ours, computed from its log-probabilities, and these with the sampler's.
A server that averages instead of summing, or scores at another temperature than it samples at, is
detected at the first step; each mismatch is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.backends import UpdateStats
from retrain.backends.objective import TokenData
from retrain.errors import RunFailedError
from retrain.rollouts import Floats, Loss, TrainingSample

LOSS = "loss:sum"  # the API's name for its loss
LOSS_TOLERANCE = 0.02  # of the loss; log-probabilities come as float32 or bfloat16
GAP_NATS = 0.1  # mean difference per token between sampler and trainer; rounding stays far below
log = logging.getLogger(__name__)


class Auditor:
    """Converts the API's responses into statistics; warns once about each mismatch."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def read(
        self,
        samples: Sequence[TrainingSample],
        loss: Loss,
        outputs: Sequence[Mapping[str, Any]],
        metrics: Mapping[str, float],
        *,
        on_policy: bool,
    ) -> UpdateStats:
        """Return a step's statistics.

        `entropy` is estimated by the mean surprisal of the sampled tokens; `grad_norm` is 0 if the API
        does not report it. If the response has no log-probabilities, the sampler's are used.

        Args:
            samples: the training samples.
            loss: the run's loss.
            outputs: one mapping per sample.
            metrics: of the forward-backward pass and the optimizer step together.
            on_policy: whether the samples are from the policy that was updated.

        Raises:
            RunFailedError: the response does not match the samples.
        """
        data, scored = TokenData.of(samples), _scored(samples, outputs)
        sampled = data.sampler_logprobs
        logprobs = sampled if scored is None else scored
        terms = loss.evaluate(logprobs, sampled, data.advantages, data.sequence)
        ours = float(np.dot(data.weights, terms.value))
        scale = float(np.dot(data.weights, np.abs(terms.value)))
        theirs = float(metrics.get(LOSS, ours))
        if scored is not None:
            self._compare_losses(loss.name, theirs, ours, LOSS_TOLERANCE * scale)
        if on_policy:
            self._compare_logprobs(logprobs, sampled)
        return UpdateStats(
            loss=ours if np.isfinite(theirs) else theirs,
            grad_norm=_grad_norm(metrics),
            entropy=float(-logprobs.mean()),
            clip_fraction=float(terms.clipped.mean()),
        )

    def _compare_losses(self, name: str, theirs: float, ours: float, tolerance: float) -> None:
        if abs(theirs - ours) > tolerance:
            ours_is = f"ours of the same log-probabilities {ours:.4g}"
            self._warn(f"the API's {name} loss is {theirs:.4g}, {ours_is}")

    def _compare_logprobs(self, theirs: Floats, sampled: Floats) -> None:
        gap = float(np.mean(np.abs(theirs - sampled)))
        if gap > GAP_NATS:
            self._warn(
                f"the API scores its own samples {gap:.2f} nats per token away from its sampler; "
                "ratios are off, use temperature = 1.0"
            )

    def _warn(self, text: str) -> None:
        kind = text[:20]
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(text)


def _scored(samples: Sequence[TrainingSample], outputs: Sequence[Mapping[str, Any]]) -> Floats | None:
    """Return the trainer's log-probabilities of all completion tokens; None if the API returns none."""
    if len(outputs) != len(samples):
        raise RunFailedError(f"the API returned {len(outputs)} results for {len(samples)} rollouts")
    if any("logprobs" not in output for output in outputs):
        return None
    parts = []
    for sample, output in zip(samples, outputs, strict=True):
        values = np.asarray(output["logprobs"].data, dtype=np.float64)
        if len(values) < len(sample.rollout.tokens):
            raise RunFailedError(
                f"the API returned {len(values)} log-probabilities for a rollout of "
                f"{len(sample.rollout.tokens)} tokens"
            )
        parts.append(values[len(values) - len(sample.rollout.tokens) :])
    return np.concatenate(parts)


def _grad_norm(metrics: Mapping[str, float]) -> float:
    """Return the gradient norm before clipping; the metric's name differs between servers."""
    names = [name for name in metrics if "grad" in name and ("norm" in name or "l2" in name)]
    unclipped = [name for name in names if "unclipped" in name] or names
    return float(metrics[unclipped[0]]) if unclipped else 0.0
