"""Whether a server samples from the policy that is trained: by the log-probabilities of a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from retrain.engines import Drawn, Ids
from retrain.errors import RunFailedError
from retrain.rollouts import Prompt, Rollout, TrainingSample

TOLERANCE_NATS = 0.2  # mean over tokens; differences from kernels and bfloat16 are ten times smaller
NOISE_NATS = 0.02  # smaller differences are noise
CHECKED_TOKENS = 256


def reject_other_policy(nats_apart: Callable[[float], float], temperature: float) -> None:
    """Raise RunFailedError if a server's log-probabilities, sampled at a temperature, are not ours.

    `nats_apart` returns their mean distance from ours at a temperature.
    """
    apart = nats_apart(temperature)
    if apart > NOISE_NATS and nats_apart(1.0) < apart / 2:
        raise RunFailedError(
            "the sampling server reports log-probabilities before the temperature is applied; start it "
            "with processed ones (vLLM: --logprobs-mode processed_logprobs)"
        )
    if apart > TOLERANCE_NATS:
        raise RunFailedError(
            f"the sampling server's log-probabilities are {apart:.2f} nats per token from "
            "this model's; check that it serves the same weights and applies the adapters"
        )


def reject_unknown(drawn: Sequence[Drawn], known: int) -> None:
    """Raise RunFailedError for tokens without an embedding: on a GPU they would crash the process."""
    if unknown := [token for one in drawn for token in one.tokens if not 0 <= token < known]:
        raise RunFailedError(
            f"the sampling server drew token {unknown[0]}, and this model knows {known}; "
            "check that it serves the same model"
        )


def first_tokens(
    prompts: Sequence[Ids], drawn: Sequence[Drawn]
) -> tuple[list[TrainingSample], dict[str, Ids]]:
    """Return enough completions for the comparison, and their prompts by text."""
    samples: list[TrainingSample] = []
    texts: dict[str, Ids] = {}
    tokens = 0
    for number, (ids, one) in enumerate(zip(prompts, drawn, strict=True)):
        rollout = Rollout(Prompt(number, str(number), ""), "", one.tokens, one.logprobs, (), not one.ended)
        samples.append(TrainingSample(rollout, np.zeros(len(one.tokens)), 1.0))
        texts[str(number)] = ids
        tokens += len(one.tokens)
        if tokens >= CHECKED_TOKENS:
            break
    return samples, texts
