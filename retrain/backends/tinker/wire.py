"""Converts samples to the API's format and its responses to rollouts, with checks that servers omit.

Position i of a datum's input predicts token i + 1 of prompt + completion. Targets, the sampler's
log-probabilities and advantages are stored at the position that predicts their token. On the prompt the
last two are 0, so every loss is 0 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrain.backends import Sampling
from retrain.backends.tinker.losses import ApiLoss
from retrain.errors import ConfigError, NonFiniteError, RunFailedError
from retrain.rollouts import Prompt, Rollout, TrainingSample

if TYPE_CHECKING:
    from tinker.types import Datum, SampleResponse

    from retrain.backends.tinker.text import Text


@dataclass(frozen=True, slots=True, eq=False)
class DatumArrays:
    """One rollout; all arrays have shape (prompt tokens + completion tokens - 1,)."""

    inputs: tuple[int, ...]
    targets: NDArray[np.int64]
    logprobs: NDArray[np.float32]  # of the sampler, nats
    advantages: NDArray[np.float32]  # multiplied by the token weight
    completion: NDArray[np.float32]  # 1 where a completion token is predicted, else 0


def datum_arrays(prompt: Sequence[int], sample: TrainingSample) -> DatumArrays:
    """Return a sample as arrays.

    Raises:
        ConfigError: the prompt has no token, so nothing predicts the completion's first token.
        RunFailedError: the lengths of tokens, log-probabilities and advantages differ.
        NonFiniteError: a log-probability or an advantage is NaN or infinite.
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
    for name, values in (("log-probabilities", rollout.logprobs), ("weighted advantages", weighted)):
        with np.errstate(over="ignore"):  # float32 overflow is rejected as infinite
            if not np.isfinite(np.asarray(values, dtype=np.float32)).all():
                raise NonFiniteError(f"the {name} of a rollout of prompt {number} are not finite")
    whole = (*prompt, *tokens)
    return DatumArrays(
        inputs=whole[:-1],
        targets=np.array(whole[1:], dtype=np.int64),
        logprobs=_shifted(len(prompt), rollout.logprobs),
        advantages=_shifted(len(prompt), weighted),
        completion=_shifted(len(prompt), np.ones(len(tokens))),
    )


def check_advantages(samples: Sequence[TrainingSample], loss: ApiLoss) -> None:
    """Reject advantages for which the API's loss differs from ours.

    Raises:
        ConfigError: the loss has one ratio per rollout, but advantages differ within a rollout.
    """
    if loss.is_per_rollout and any(np.ptp(s.advantages) > 0 for s in samples if len(s.advantages)):
        raise ConfigError(
            '[algorithm].loss_mode: the Tinker API computes "gspo" for advantages that are equal within a '
            'rollout only; use transform_mode = "none", or another loss'
        )


def to_datum(arrays: DatumArrays, loss: ApiLoss) -> Datum:
    """Return the SDK's object."""
    from tinker import TensorData, types

    inputs: dict[str, Any] = {
        "target_tokens": TensorData.from_numpy(arrays.targets),
        "logprobs": TensorData.from_numpy(arrays.logprobs),
        "advantages": TensorData.from_numpy(arrays.advantages),
    }
    if loss.is_supervised:
        del inputs["logprobs"], inputs["advantages"]
        inputs["weights"] = TensorData.from_numpy(arrays.advantages)
    if loss.is_per_rollout:
        inputs["sequence_ratio_mask"] = TensorData.from_numpy(arrays.completion)
    return types.Datum(model_input=types.ModelInput.from_ints(list(arrays.inputs)), loss_fn_inputs=inputs)


def to_rollouts(
    prompt: Prompt, response: SampleResponse, sampling: Sampling, version: int, text: Text
) -> tuple[Rollout, ...]:
    """Return the API's samples as rollouts.

    Raises:
        RunFailedError: too few rollouts, or the numbers of tokens and log-probabilities differ.
    """
    if len(response.sequences) != sampling.group_size:
        raise RunFailedError(
            f"prompt {prompt.id}: asked for {sampling.group_size} rollouts, got {len(response.sequences)}"
        )
    rollouts = []
    for sequence in response.sequences:
        tokens = tuple(sequence.tokens)
        logprobs = np.asarray(sequence.logprobs or (), dtype=np.float64)
        if len(logprobs) != len(tokens) or not np.isfinite(logprobs).all():
            raise RunFailedError(
                f"prompt {prompt.id}: the API sampled {len(tokens)} tokens with {len(logprobs)} "
                "log-probabilities; needs a finite one for each"
            )
        rollouts.append(
            Rollout(
                prompt=prompt,
                text=text.decode(tokens),
                tokens=tokens,
                logprobs=logprobs,
                pieces=text.pieces(tokens),
                truncated=sequence.stop_reason == "length" and tokens[-1:] != (text.end,),
                policy_version=version,
            )
        )
    return tuple(rollouts)


def _shifted(prompt_length: int, values: Any) -> NDArray[np.float32]:
    return np.concatenate([np.zeros(prompt_length - 1), np.asarray(values)]).astype(np.float32)
