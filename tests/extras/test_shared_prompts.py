"""Training that runs a prompt once for its group: the same numbers, of fewer tokens, and only where exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from retrain.backends.local.micro_batches import MicroBatch, lay_out
from retrain.backends.local.policy import LocalBackend
from retrain.backends.local.training import evaluate, predicting_states
from retrain.base.rollouts import Given, Prompt, Rollout, TrainingSample
from tests.extras.local_policies import open_backend, stir
from tests.extras.test_local_architectures import CONFIGS, OWN_ATTENTION, save

IDS = {"long": tuple(range(2, 14)), "short": (5, 6, 7), "other": tuple(range(20, 30))}
PROMPTS = {Prompt(0, name, ""): ids for name, ids in IDS.items()}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
SHARING = ("llama", "dropout and joined projections", "parallel layers", "scaled logits", "experts")


def opened(name: str, directory: Path) -> LocalBackend:
    backend = open_backend(save(CONFIGS.get(name) or OWN_ATTENTION[name], directory))
    stir(backend)
    return backend


def sample(prompt: str, length: int, given: tuple[Given, ...] = ()) -> TrainingSample:
    tokens = tuple(np.random.default_rng(length).integers(2, 40, length).tolist())
    pieces = ("",) * length
    rollout = Rollout(Prompt(0, prompt, ""), "", tokens, np.zeros(length), pieces, False, given=given)
    return TrainingSample(rollout, np.ones(length), 1.0)


def groups(*lengths: int) -> list[TrainingSample]:
    return [sample(prompt, length) for length in lengths for prompt in IDS]


def results(
    backend: LocalBackend, batches: list[MicroBatch]
) -> tuple[dict[tuple[int, ...], np.ndarray], list[torch.Tensor]]:
    """Log-probabilities of each sequence by its tokens and prompt, and the gradient of their weighted sum."""
    found, parameters = {}, [*backend.policy.trainable().values()]
    for batch in batches:
        logprobs = evaluate(backend.policy, predicting_states(backend.policy, batch), batch.targets, 0.8)[0]
        torch.dot(logprobs, torch.cos(batch.targets.float())).backward()
        of_sequences = np.split(logprobs.detach().numpy(), np.cumsum(np.bincount(batch.data.sequence))[:-1])
        targets = np.split(batch.targets.numpy(), np.cumsum(np.bincount(batch.data.sequence))[:-1])
        for ids, numbers in zip(targets, of_sequences, strict=True):
            found.setdefault(tuple(ids), []).append(numbers)
    gradient = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return {ids: np.sort(numbers, axis=0) for ids, numbers in found.items()}, gradient


@pytest.mark.parametrize("name", SHARING)
def test_shared_prompts_have_the_log_probabilities_and_the_gradient_of_whole_sequences(
    name: str, tmp_path: Path
) -> None:
    backend = opened(name, tmp_path)
    samples = groups(1, 4, 6, 7)
    alone = lay_out(samples, PROMPTS, 1, backend.policy)
    shared = lay_out(samples, PROMPTS, 10**6, backend.policy, backend.learner.most_shared)
    assert [batch.layout is not None for batch in shared] == [True]

    (wanted, of_alone), (found, of_shared) = results(backend, alone), results(backend, shared)

    assert found.keys() == wanted.keys()
    assert all(np.allclose(found[ids], wanted[ids], **TOLERANCE) for ids in wanted)
    largest = max(float(one.abs().max()) for one in of_alone)
    assert largest > 1e-3
    for ours, whole in zip(of_shared, of_alone, strict=True):
        assert torch.allclose(ours, whole, rtol=1e-4, atol=1e-5 * largest)


def test_given_tokens_are_read_with_a_shared_prompt(tmp_path: Path) -> None:
    backend = opened("llama", tmp_path)
    turns = (Given(2, (9, 10, 11), ""),)
    samples = [*groups(3, 5), *(sample("long", length, turns) for length in (4, 6))]
    (shared,) = lay_out(samples, PROMPTS, 10**6, backend.policy, 64)
    found, wanted = (
        results(backend, [shared])[0],
        results(backend, lay_out(samples, PROMPTS, 1, backend.policy)),
    )
    assert shared.layout is not None
    assert all(np.allclose(found[ids], wanted[0][ids], **TOLERANCE) for ids in found)


@pytest.mark.parametrize("name", ["capped logits", "local attention", "biases by distance", "rotary"])
def test_a_model_whose_attention_is_another_runs_whole_sequences(name: str, tmp_path: Path) -> None:
    assert opened(name, tmp_path).learner.most_shared == 0


def test_a_sequence_longer_than_a_sliding_window_is_run_whole(tmp_path: Path) -> None:
    backend = opened("sliding windows", tmp_path)
    assert backend.learner.most_shared == 6

    def layouts(*lengths: int) -> set[bool]:
        samples = [sample("short", length) for length in lengths]
        batches = lay_out(samples, PROMPTS, 10**6, backend.policy, backend.learner.most_shared)
        return {batch.layout is not None for batch in batches}

    assert layouts(2, 3, 4, 4) == {True}
    assert layouts(2, 3, 4, 5) == {False}


def test_a_prompt_is_shared_only_where_that_saves_enough(tmp_path: Path) -> None:
    policy = opened("llama", tmp_path).policy

    def run(*samples: TrainingSample) -> list[tuple[int, int]]:
        batches = lay_out(samples, PROMPTS, 10**6, policy, 10**6)
        return [(batch.input_ids.numel(), batch.tokens) for batch in batches]

    short, long = sample("long", 5), sample("long", 60)
    assert run(short) == [(16, 17)]
    assert run(short, short, short) == [(12 + 3 * 4, 12 + 3 * 5)]
    assert run(long, long) == [(2 * 71, 2 * 72)]


def test_micro_batches_hold_groups_or_similar_lengths_whichever_leaves_less_to_run(tmp_path: Path) -> None:
    policy = opened("llama", tmp_path).policy

    def shapes(samples: list[TrainingSample], budget: int) -> list[tuple[int, int]]:
        batches = lay_out(samples, PROMPTS, budget, policy, 10**6)
        return [(1 if one.layout is None else one.layout.prompts, len(one.targets)) for one in batches]

    assert shapes(groups(9, 8, 9, 8), 50) == [(1, 34), (1, 34), (1, 34)]
    assert [tokens for _, tokens in shapes(groups(40, 2), 104)] == [80, 42, 4]
