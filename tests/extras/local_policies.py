"""What tests of the local backend start from: a backend on a tiny model, samples, and plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.local import connect
from retrain.backends.local.policy import LocalBackend
from retrain.base import registry
from retrain.base.rollouts import Group, Loss, Prompt, TrainingSample

UNEVEN = tuple(Prompt(i, text, "1") for i, text in enumerate(["7=", "12+30=", "9=", "abcdefghij=", "q="]))


def open_backend(model: str | Path, *, seed: int = 0, rank: int = 4, **options: Any) -> LocalBackend:
    """A backend in float32 on the CPU, from files only."""
    options = {"local_files_only": True, "device": "cpu", **options}
    return connect(BackendSpec(seed=seed, model=str(model), lora_rank=rank, options=options))


def draw(
    backend: LocalBackend,
    prompts: Sequence[Prompt] = UNEVEN,
    *,
    group_size: int = 3,
    max_tokens: int = 9,
    temperature: float = 0.8,
) -> list[Group]:
    return backend.sample(prompts, Sampling(group_size, max_tokens, temperature))


def loss_named(name: str, **params: Any) -> Loss:
    return Loss(name, partial(registry.find_plugin("losses", name), **params), params)


def as_samples(groups: Sequence[Group], *, seed: int = 0, drift: float = 0.0) -> list[TrainingSample]:
    """Rollouts with random advantages, as if the sampler's log-probabilities were `drift` away."""
    choice = np.random.default_rng(seed)
    rollouts = [(number, rollout) for number, group in enumerate(groups) for rollout in group.rollouts]
    tokens = sum(len(rollout.tokens) for _, rollout in rollouts)
    samples = []
    for number, rollout in rollouts:
        rollout.logprobs[:] += drift * choice.standard_normal(len(rollout.tokens))
        advantages = np.full(len(rollout.tokens), choice.standard_normal())
        samples.append(TrainingSample(rollout, advantages, 1.0 / tokens, number))
    return samples


def gradient_of(
    backend: LocalBackend, samples: Sequence[TrainingSample], loss: Loss, how: Optimization
) -> dict[str, torch.Tensor]:
    """What an update's first AdamW step sees: read off its first moment, which is a tenth of it."""
    backend.update(samples, loss, how)
    state = backend.optimizer.state()
    return {name: tensor * 10 for name, tensor in state.items() if name.startswith("exp_avg.")}


def stir(backend: LocalBackend, seed: int = 0) -> None:
    """Move the adapters away from their start, where they do nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in backend.policy.trainable().values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    backend.reset_optimizer()  # as every change of the policy by the backend, known to its server


def plain_logprobs(
    backend: LocalBackend, samples: Sequence[TrainingSample], temperature: float, *, reference: bool = False
) -> list[torch.Tensor]:
    """Every rollout alone, without cache, padding or chunks: full log-softmax of the model's own logits."""
    causal = backend.policy.causal
    found = []
    for sample in samples:
        prompt = backend.text.encode(sample.rollout.prompt)
        ids = torch.tensor([[*prompt, *sample.rollout.tokens]])
        if reference:
            with backend.policy.adapters.disable_adapter(), torch.no_grad():
                logits = causal(input_ids=ids).logits
        else:
            logits = causal(input_ids=ids).logits
        found.append((logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1))
    return found


def chosen(logps: torch.Tensor, sample: TrainingSample) -> torch.Tensor:
    return logps[torch.arange(len(logps)), torch.tensor(sample.rollout.tokens)]
