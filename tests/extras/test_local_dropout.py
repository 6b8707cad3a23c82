"""Dropout of adapters: peft's, in training only, with masks that depend on the step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft.tuners.lora import Linear

from retrain.backends import Optimization
from retrain.backends.local import check_options, loading, training
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

HOW = Optimization(lr=0.0, max_grad_norm=1e9, temperature=0.8)
PPO = loss_named("ppo")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64)


def dropping(model: str, dropout: float = 0.3, **options: object):
    backend = open_backend(model, lora_dropout=dropout, **options)
    stir(backend)
    return backend


def samples_of(model: str) -> list[TrainingSample]:
    """The same for every backend on a model."""
    return as_samples(draw(open_backend(model)))


def gradient(backend, model: str) -> torch.Tensor:
    found = gradient_of(backend, samples_of(model), PPO, HOW)
    return torch.cat([tensor.flatten() for tensor in found.values()])


@pytest.mark.parametrize("is_training", [True, False])
def test_the_short_forward_pass_is_pefts(model, is_training):
    layer = next(m for m in dropping(model).policy.causal.modules() if isinstance(m, Linear))
    layer.lora_dropout.train(is_training)
    x = torch.randn(2, 3, layer.in_features, generator=torch.Generator().manual_seed(1))
    outputs = []
    for forward in (layer.forward, lambda x: Linear.forward(layer, x)):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            outputs.append(forward(x))
    assert torch.allclose(*outputs, atol=1e-6)


def test_dropout_is_on_in_training_only(model):
    backend, plain = dropping(model), dropping(model, 0.0)
    assert not torch.allclose(gradient(backend, model), gradient(plain, model), rtol=0.1)
    samples = as_samples(draw(backend))
    for sample, logps in zip(samples, plain_logprobs(plain, samples, 0.8), strict=True):
        assert np.allclose(chosen(logps, sample).detach(), sample.rollout.logprobs, atol=1e-4)


def test_masks_depend_on_the_step_and_repeat_with_it(model):
    backend = dropping(model)
    first = gradient(backend, model)
    assert torch.equal(gradient(dropping(model), model), first)
    second = gradient(backend, model) - 0.9 * first  # off ten times Adam's first moment
    assert not torch.allclose(second, first, rtol=0.1)
    plain = dropping(model, 0.0)
    first = gradient(plain, model)
    assert torch.allclose(gradient(plain, model) - 0.9 * first, first, rtol=1e-3, atol=1e-7)


def test_recomputed_activations_have_the_same_masks(model):
    recomputed = gradient(dropping(model, gradient_checkpointing=True), model)
    assert torch.allclose(recomputed, gradient(dropping(model), model), rtol=1e-4, atol=1e-6)


def test_a_head_computed_in_chunks_is_recomputed_with_the_same_masks(model, monkeypatch):
    monkeypatch.setattr(loading, "LOGITS_AT_A_TIME", 200)  # five tokens
    recomputed = gradient(dropping(model, target_modules=["lm_head"]), model)
    monkeypatch.setattr(training, "checkpoint", lambda score, *pair, **_: score(*pair))
    kept = gradient(dropping(model, target_modules=["lm_head"]), model)
    assert torch.allclose(recomputed, kept, rtol=1e-4, atol=1e-6)


def test_dropout_without_adapters_is_refused():
    assert check_options({"lora": False, "lora_dropout": 0.1}) == [
        "lora_dropout: needs lora = true, because it is dropout of adapters"
    ]
    assert check_options({"lora_dropout": 1.0}) == ["lora_dropout: got 1.0; needs a number from 0 to 0.95"]
