"""What the Tinker API is sent has the gradient of the local backend, on the same tokens of the same model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from retrain.backends import Optimization
from retrain.backends.local.policy import LocalBackend
from retrain.backends.objective import RatioCap
from retrain.backends.tinker.wire import LINEAR, Linear, loss_inputs
from retrain.base.rollouts import TrainingSample
from tests.extras.local_policies import (
    as_samples,
    chosen,
    draw,
    gradient_of,
    loss_named,
    open_backend,
    plain_logprobs,
    stir,
)
from tests.extras.tiny_models import save_tiny_model

CAPS = {"none": None, "token": RatioCap(1.1), "sequence": RatioCap(1.1, "sequence", "mask")}
LOSSES = ("ppo", "importance_sampling", "cispo", "gspo")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalBackend, list[TrainingSample]]:
    """A policy away from its base model, and rollouts that another has drawn."""
    backend = open_backend(save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64))
    stir(backend)
    return backend, as_samples(draw(backend, temperature=1.0), drift=0.2)


@pytest.fixture
def policy(made: tuple[LocalBackend, list[TrainingSample]]) -> Iterator[LocalBackend]:
    """The policy, which an update does not change for the next test."""
    backend, _ = made
    before = {name: tensor.detach().clone() for name, tensor in backend.policy.trainable().items()}
    yield backend
    with torch.no_grad():
        for name, tensor in backend.policy.trainable().items():
            tensor.copy_(before[name])
    backend.reset_optimizer()


def flat(backend: LocalBackend, samples: list[TrainingSample], *, reference: bool = False) -> torch.Tensor:
    found = plain_logprobs(backend, samples, 1.0, reference=reference)
    return torch.cat([chosen(logps, one) for logps, one in zip(found, samples, strict=True)])


def gradient_at_the_api(backend: LocalBackend, samples: list[TrainingSample]) -> dict[str, torch.Tensor]:
    """Differentiate the API's cross-entropy loss, minus the sum of weight x log-probability, by autograd."""
    tensors = backend.policy.trainable()
    for tensor in tensors.values():
        tensor.grad = None
    total = torch.zeros(())
    for one in samples:
        prompt = backend.text.encode(one.rollout.prompt)
        sent = loss_inputs(prompt, one, LINEAR)
        read = torch.tensor([[*prompt, *one.rollout.tokens[:-1]]])
        logps = backend.policy.causal(input_ids=read).logits[0].log_softmax(-1)
        targets = torch.tensor(sent["target_tokens"])
        total = total - torch.dot(torch.tensor(sent["weights"]), logps[torch.arange(len(targets)), targets])
    total.backward()
    return {name: tensor.grad.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("cap", CAPS.values(), ids=CAPS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_local_backend(policy, made, name, kl_coef, cap) -> None:
    if name == "gspo" and cap is not None and cap.scope == "token":
        return  # gspo has no ratio per token
    samples, loss = made[1], loss_named(name)
    if cap is not None:
        loss = replace(loss, evaluate=cap.limit(loss.evaluate), is_capped=True)
    how = Optimization(1e-3, max_grad_norm=1e9, kl_coef=kl_coef)
    with torch.no_grad():
        scored = flat(policy, samples).numpy().astype(np.float64)
        near = flat(policy, samples, reference=True).numpy().astype(np.float64) if kl_coef else None
    linear = Linear.of(samples, loss, how, scored, near)
    theirs = gradient_at_the_api(policy, linear.samples)
    ours = gradient_of(policy, samples, loss, how)
    assert max(float(tensor.abs().max()) for tensor in ours.values()) > 1e-4
    for key, tensor in ours.items():
        torch.testing.assert_close(theirs[key.removeprefix("exp_avg.")], tensor, rtol=1e-4, atol=1e-6)
