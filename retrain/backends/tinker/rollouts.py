"""What the API sampled, checked and translated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from retrain.backends import Sampling
from retrain.errors import RunFailedError
from retrain.rollouts import Prompt, Rollout

if TYPE_CHECKING:
    from tinker.types import SampleResponse

    from retrain.backends.tinker.text import Text


def to_rollouts(
    prompt: Prompt, response: SampleResponse, sampling: Sampling, version: int, text: Text
) -> tuple[Rollout, ...]:
    """Check and translate what was sampled.

    Raises:
        RunFailedError: there are too few rollouts, or log-probabilities do not fit the tokens.
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
