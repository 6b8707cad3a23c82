"""The loss as the API is sent it, with one datum per rollout, and the statistics that it returns.

The API sums the loss over all tokens and clips ratios at absolute bounds, while ours are distances
from 1. All these losses are homogeneous in the advantage, L(w A) = w L(A) for w > 0, so token weights
are multiplied into the advantages and the API's sum is our normalised loss.
Formulas: https://tinker-docs.thinkingmachines.ai/losses.

Position i of a datum's input predicts token i + 1 of prompt + completion. Targets, the sampler's
log-probabilities and advantages are stored at the position that predicts their token. On the prompt the
last two are 0, so every loss is 0 there.

Servers omit checks, so they are made here. The API's loss is compared with ours, computed from its
log-probabilities, and these with the sampler's: a server that averages instead of summing, or scores at
another temperature than it samples at, is detected at the first step.

For a loss that the API does not compute, it is sent the slope that ours has at each token: `Linear`.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from retrain.backends import Optimization, UpdateStats
from retrain.backends.engines import Ids
from retrain.backends.objective import TokenData
from retrain.base.errors import ConfigError, NonFiniteError, RunFailedError
from retrain.base.rollouts import SUPERVISED, Floats, Loss, LossTerms, TrainingSample

if TYPE_CHECKING:
    from tinker.types import Datum, LossFnOutput

    from retrain.backends.tinker.session import UpdateOutcome

Name = Literal["importance_sampling", "ppo", "cispo", "gspo", "cross_entropy"]
KNOWN = tuple(name for name in get_args(Name) if name != "cross_entropy")  # valid as a run's loss
UNCLIPPED = ("importance_sampling",)  # the others take two bounds
LOSS = "loss:sum"  # the API's name for its loss
LOSS_TOLERANCE = 0.02  # of the loss; log-probabilities come as float32 or bfloat16
GAP_NATS = 0.1  # mean difference per token between sampler and trainer; rounding stays far below
BARE = Optimization(lr=0.0)  # no KL term and no bonus: a loss that has them brings them along
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ApiLoss:
    """A loss function of the API with its parameters."""

    name: Name
    config: Mapping[str, float]

    @property
    def is_per_rollout(self) -> bool:
        """Whether there is one ratio per rollout: the API then needs the mask of its tokens."""
        return self.name == "gspo"

    @property
    def is_supervised(self) -> bool:
        """Whether the loss takes target weights instead of sampler log-probabilities."""
        return self.name == "cross_entropy"


LINEAR = ApiLoss("cross_entropy", {})  # minus the sum of weight x log-probability
RATIO = ApiLoss("importance_sampling", {})  # with ratios of 1: the same gradient


def api_loss(loss: Loss, samples: Sequence[TrainingSample] = ()) -> ApiLoss | None:
    """Translate a loss that the API computes itself; None if it does not.

    Missing clip bounds default to those of our own function. The API's `gspo` needs advantages that are equal
    within a rollout, because it has one ratio for each.
    """
    if loss.name == SUPERVISED:
        return LINEAR
    if loss.name not in KNOWN or loss.is_capped:
        return None
    name = cast(Name, loss.name)
    if name in UNCLIPPED:
        return ApiLoss(name, {})
    parameters = inspect.signature(loss.evaluate).parameters
    low, high = (float(parameters[key].default) for key in ("clip_low", "clip_high"))
    translated = ApiLoss(name, {"clip_low_threshold": 1.0 - low, "clip_high_threshold": 1.0 + high})
    differ = translated.is_per_rollout and any(np.ptp(s.advantages) > 0 for s in samples if len(s.advantages))
    return None if differ else translated


def loss_inputs(prompt: Ids, sample: TrainingSample, loss: ApiLoss) -> dict[str, NDArray[Any]]:
    """Return a sample's arrays by the API's names, each of shape (prompt tokens + rollout's tokens - 1,).

    Raises a ConfigError, RunFailedError or NonFiniteError for what servers would accept: a prompt without a
    token, lengths that differ, and numbers that are not finite as float32.
    """
    rollout = sample.rollout
    tokens, number = rollout.tokens, rollout.prompt.id
    lengths = (len(tokens), len(rollout.logprobs), len(sample.advantages))
    if not prompt:
        raise ConfigError(f"[data]: prompt {number} is {rollout.prompt.text!r}, which has no token")
    if len(set(lengths)) > 1 or not tokens:
        raise RunFailedError(
            f"a rollout of prompt {number} has {lengths[0]} tokens, {lengths[1]} log-probabilities and "
            f"{lengths[2]} advantages; needs equal numbers, at least one; check the transform"
        )
    weighted = np.asarray(sample.advantages, dtype=np.float64) * sample.token_weight
    arrays = {"logprobs": rollout.logprobs, "advantages": weighted}
    if loss.is_supervised:
        arrays = {"weights": weighted}
    if loss.is_per_rollout:
        arrays["sequence_ratio_mask"] = np.ones(len(tokens))
    read, places = rollout.placed()
    targets = np.array([*prompt, *read][1:], dtype=np.int64)
    inputs: dict[str, NDArray[Any]] = {"target_tokens": targets}
    for name, values in arrays.items():
        inputs[name] = np.zeros(len(targets), dtype=np.float32)  # no loss where a token was given
        with np.errstate(over="ignore"):  # float32 overflow is rejected as infinite
            inputs[name][np.array(places) + len(prompt) - 1] = values
        if not np.isfinite(inputs[name]).all():
            raise NonFiniteError(f"the {name} of a rollout of prompt {number} are not finite")
    return inputs


def to_datum(prompt: Ids, sample: TrainingSample, loss: ApiLoss) -> Datum:
    """Return a sample as the SDK's object."""
    from tinker import TensorData, types

    arrays = loss_inputs(prompt, sample, loss)
    inputs = {name: TensorData.from_numpy(array) for name, array in arrays.items()}
    tokens = [*prompt, *sample.rollout.placed()[0][:-1]]
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def gradient_norm(metrics: Mapping[str, float]) -> float | None:
    """Return the gradient norm before clipping, whose name differs between servers; None if not told."""
    norms = [name for name in metrics if "grad" in name and re.search("norm|l2", name)]
    norms.sort(key=lambda name: "unclipped" not in name)
    return float(metrics[norms[0]]) if norms else None


class Auditor:
    """Converts the API's responses into statistics; warns once about each mismatch."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def read(
        self, samples: Sequence[TrainingSample], loss: Loss, outcome: UpdateOutcome, *, on_policy: bool
    ) -> UpdateStats:
        """Return a step's statistics; a RunFailedError if the response does not match the samples.

        `entropy` is estimated by the mean surprisal of the sampled tokens; `grad_norm` is 0 if the API
        does not report it. If the response has no log-probabilities, the sampler's are used. `on_policy`
        samples are from the policy that was updated.
        """
        data, scored = TokenData.of(samples), scored_by(samples, outcome.outputs)
        logprobs = data.sampler_logprobs if scored is None else scored
        terms, totals = data.evaluate(loss, logprobs, -logprobs, None, BARE)
        grad_norm = gradient_norm(outcome.metrics)
        if grad_norm is None:
            self._warn(
                "the server reports no gradient norm: rows have 0, and where it does not clip either, "
                "[training].max_grad_norm has no effect"
            )
        stats = totals.stats(grad_norm or 0.0, None, BARE)
        theirs = float(outcome.metrics.get(LOSS, stats.loss))
        tolerance = LOSS_TOLERANCE * float(np.dot(data.weights, np.abs(terms.value)))
        if scored is not None and abs(theirs - stats.loss) > tolerance:
            ours_is = f"ours of the same log-probabilities {stats.loss:.4g}"
            self._warn(f"the API's {loss.name} loss is {theirs:.4g}, {ours_is}")
        gap = totals.sampler_gap / totals.tokens
        if on_policy and gap > GAP_NATS:
            self._warn(
                f"the API's log-probabilities of its own samples are {gap:.2f} nats per token away from its "
                "sampler's, so importance ratios are wrong; use temperature = 1.0"
            )
        if scored is None:
            stats = replace(stats, approx_kl=None, mismatch=None)
        return stats if np.isfinite(theirs) else replace(stats, loss=theirs)

    def _warn(self, text: str) -> None:
        kind = re.sub(r"\d.*", "", text)  # without the figures, which differ
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(text)


def scored_by(samples: Sequence[TrainingSample], outputs: Sequence[LossFnOutput]) -> Floats | None:
    """Return the trainer's log-probabilities of all completion tokens; None if the API returns none."""
    if len(outputs) != len(samples):
        raise RunFailedError(f"the API returned {len(outputs)} results for {len(samples)} rollouts")
    if any("logprobs" not in output for output in outputs):
        return None
    parts = []
    for sample, output in zip(samples, outputs, strict=True):
        values = np.asarray(output["logprobs"].data, dtype=np.float64)
        length, (_, places) = sample.rollout.length, sample.rollout.placed()
        if len(values) < length:
            raise RunFailedError(
                f"the API returned {len(values)} log-probabilities for a rollout of {length} tokens"
            )
        parts.append(values[len(values) - length + np.array(places)])
    return np.concatenate(parts)


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A loss and its slopes at the policy's log-probabilities.

    A forward pass returns the policy's log-probabilities. Our loss, with the KL term, turns them into a slope
    per token, and the sum of slope x log-probability, which the API computes, has the same gradient. The
    SDK's `forward_backward_custom` makes the same requests; here each holds a permit, no PyTorch is needed,
    and an update is plain data, which is replayed exactly after a failure. A server that divides weighted
    log-probabilities by the sum of their weights is sent ratios instead.

    The entropy of the whole distribution is not known. Its gradient is minus the expectation of
    log-probability x gradient of the log-probability, of which the tokens that the policy drew are an
    unbiased estimate. Their mean log-probability is subtracted, which changes no expectation and takes most
    of the variance (Williams, 1992, doi:10.1007/BF00992696).
    """

    samples: list[TrainingSample]  # minus the weighted slopes as advantages
    loss: Loss  # as the API computes it
    form: ApiLoss
    logprobs: list[Floats]  # the policy's, by sample
    value: float  # of the original loss, with the KL term and the entropy bonus
    reference_kl: float | None  # nats per token

    @classmethod
    def of(
        cls,
        samples: Sequence[TrainingSample],
        loss: Loss,
        optimization: Optimization,
        logprobs: Floats,
        reference: Floats | None,
        form: ApiLoss = LINEAR,
    ) -> Linear:
        """Linearize a loss at the policy's log-probabilities; `reference` has those of the base model."""
        data = TokenData.of(samples)
        terms, totals = data.evaluate(loss, logprobs, -logprobs, reference, optimization)
        bonus = optimization.entropy_bonus * data.bonus_weights * (logprobs - logprobs.mean())
        slope = data.weights * terms.slope + bonus
        ends = np.cumsum([len(sample.rollout.tokens) for sample in samples])[:-1]

        def line(now: Floats, *_: object) -> LossTerms:
            sent_as = now if form.is_supervised else np.exp(now - logprobs)
            return LossTerms(slope * sent_as, slope, terms.clipped)

        return cls(
            samples=[
                replace(sample, advantages=-slopes, token_weight=1.0)
                for sample, slopes in zip(samples, np.split(slope, ends), strict=True)
            ],
            loss=Loss(loss.name, line),
            form=form,
            logprobs=np.split(logprobs, ends),
            value=totals.loss,
            reference_kl=None if reference is None else totals.reference_kl / len(logprobs),
        )

    def sent(self) -> list[TrainingSample]:
        """Return the samples as the API is to have them: with ratios of 1, if it takes ratios."""
        if self.form.is_supervised:
            return self.samples
        pairs = zip(self.samples, self.logprobs, strict=True)
        return [replace(one, rollout=replace(one.rollout, logprobs=values)) for one, values in pairs]

    def stats(self, update: UpdateStats) -> UpdateStats:
        """Return the statistics of the update on this loss as those of the original one."""
        value = self.value if np.isfinite(update.loss) else update.loss
        return replace(update, loss=value, reference_kl=self.reference_kl)
