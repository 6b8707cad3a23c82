"""Training samples laid out as right-padded micro-batches of at most so many tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from retrain.rollouts import Floats, TrainingSample

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Whole sequences; flat arrays run over their completion tokens, sequence after sequence."""

    input_ids: torch.Tensor  # (sequences, longest), right-padded, each without its last token
    sources: torch.Tensor  # (tokens,) index, in the flattened hidden states, of what predicts each token
    targets: torch.Tensor  # (tokens,)
    sampler_logprobs: Floats
    advantages: Floats
    weights: Floats
    bonus_weights: Floats  # of the entropy bonus
    sequence: NDArray[np.int64]


def lay_out(
    samples: Sequence[TrainingSample], prompts: Mapping[str, Ids], budget: int, device: torch.device
) -> list[MicroBatch]:
    """Cut samples into micro-batches of like lengths.

    Args:
        samples: in any order.
        prompts: token ids by prompt text.
        budget: most tokens of a micro-batch, padding included; a longer sequence gets one of its own.
        device: where the tensors go.
    """

    def length(sample: TrainingSample) -> int:
        return len(prompts[sample.rollout.prompt.text]) + len(sample.rollout.tokens) - 1

    parts: list[list[TrainingSample]] = []
    for sample in sorted(samples, key=length, reverse=True):  # the first of a part is its longest
        if not parts or length(parts[-1][0]) * (len(parts[-1]) + 1) > budget:
            parts.append([])
        parts[-1].append(sample)
    return [_micro_batch(part, [prompts[s.rollout.prompt.text] for s in part], device) for part in parts]


def _micro_batch(
    samples: Sequence[TrainingSample], prompts: Sequence[Ids], device: torch.device
) -> MicroBatch:
    completions = [sample.rollout.tokens for sample in samples]
    # the last token predicts nothing
    rows = [[*prompt, *completion[:-1]] for prompt, completion in zip(prompts, completions, strict=True)]
    longest = len(rows[0])
    padded = [row + [0] * (longest - len(row)) for row in rows]
    counts = np.array([len(completion) for completion in completions])
    # a token is predicted by the state before it
    starts = np.array([len(prompt) - 1 for prompt in prompts]) + longest * np.arange(len(rows))
    sequence = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return MicroBatch(
        input_ids=torch.tensor(padded, device=device),
        sources=torch.as_tensor(np.repeat(starts, counts) + within, device=device),
        targets=torch.tensor(list(chain.from_iterable(completions)), device=device),
        sampler_logprobs=np.concatenate([sample.rollout.logprobs for sample in samples]),
        advantages=np.concatenate([sample.advantages for sample in samples]),
        weights=np.repeat([sample.token_weight for sample in samples], counts),
        bonus_weights=np.repeat([sample.bonus_weight for sample in samples], counts),
        sequence=sequence,
    )
