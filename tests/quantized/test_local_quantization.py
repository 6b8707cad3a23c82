"""Bases in four bits: quantized as published, trained through, resumed, counted, refused where impossible."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from safetensors.torch import load_file

from retrain.backends import Optimization
from retrain.backends.local import check_options, memory
from retrain.config.load import parse
from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from tests.clocks import without_times
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
from tests.stopping import StopAfterStep
from tests.trainer.test_trainer import make_run

HOW = Optimization(lr=1e-2, temperature=0.8, kl_coef=0.1)
PPO = loss_named("ppo")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=64, context=64)


def quantized(model: str, **options: object):
    return open_backend(model, quantization="4bit", **options)


def test_linear_layers_hold_two_weights_in_a_byte_near_their_values(model):
    backend, plain = quantized(model), open_backend(model)
    name = "model.layers.0.mlp.up_proj"
    found = backend.policy.causal.get_submodule(name).get_base_layer().weight
    wanted = plain.policy.causal.get_submodule(name).get_base_layer().weight
    assert found.numel() == wanted.numel() / 2
    error = dequantize_4bit(found, found.quant_state) - wanted
    assert 0.05 < float(error.norm() / wanted.norm()) < 0.12  # NF4's, for normal weights
    head = backend.policy.causal.get_output_embeddings().weight
    assert torch.equal(head, plain.policy.causal.get_output_embeddings().weight)
    assert backend.info.parameters == plain.info.parameters


def test_samples_have_the_log_probabilities_that_training_sees(model):
    backend = quantized(model)
    samples = as_samples(draw(backend))
    for sample, logps in zip(samples, plain_logprobs(backend, samples, 0.8), strict=True):
        assert torch.allclose(
            chosen(logps, sample).double(), torch.tensor(sample.rollout.logprobs), atol=1e-4
        )


def expanded(model: str, **options: object):
    """A backend whose linear layers have the quantized values in full width."""
    backend, source = open_backend(model, **options), quantized(model)
    for layer, narrow in zip(backend.policy.causal.modules(), source.policy.causal.modules(), strict=True):
        if (state := getattr(getattr(narrow, "weight", None), "quant_state", None)) is not None:
            layer.weight.data = dequantize_4bit(narrow.weight, state)
    return backend


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "lora_dropout": 0.1}])
def test_gradients_are_those_of_the_same_values_in_full_width(model, options):
    found, wanted = quantized(model, **options), expanded(model, **options)
    draw(found)  # sampling leaves the weights as training needs them
    for backend in (found, wanted):
        stir(backend)
    samples = as_samples(draw(wanted), drift=0.3)
    ours, theirs = (gradient_of(backend, samples, PPO, HOW) for backend in (found, wanted))
    largest = max(float(tensor.abs().max()) for tensor in theirs.values())
    assert largest > 1e-4
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-3, atol=1e-4 * largest), name


def run_of(model: str) -> dict:
    return {
        "model": {"model": model, "lora_rank": 4},
        "training": {
            "seed": 3,
            "max_steps": 3,
            "batch_size": 3,
            "group_size": 3,
            "max_tokens": 4,
            "temperature": 1.0,
            "lr": 1e-2,
            "entropy_bonus": 0.1,
            "save_every": 1,
        },
        "algorithm": {"kl_coef": 0.01},
        "data": {"task": "successor"},
        "backend": {
            "backend": "local",
            "options": {"local_files_only": True, "device": "cpu", "quantization": "4bit"},
        },
    }


def test_a_quantized_run_resumes_to_the_same_rows(model, tmp_path: Path):
    whole = make_run(tmp_path / "whole", run_of(model))
    assert worker.run(whole.directory, threading.Event()) == 0
    broken = make_run(tmp_path / "broken", run_of(model))
    assert worker.run(broken.directory, StopAfterStep(broken, 2)) == 130
    assert worker.run(broken.directory, threading.Event()) == 0
    rows = read_metrics(whole.directory)
    assert without_times(read_metrics(broken.directory)) == without_times(rows)
    assert all(row["grad_norm"] > 0 for row in rows)
    saved = load_file(next(whole.checkpoints.glob("*/**/adapter_model.safetensors")))
    assert all("lora_" in name for name in saved)


def test_the_estimate_of_memory_counts_four_bits(tmp_path: Path):
    model = save_tiny_model(tmp_path, hidden=256, layers=4)
    held = {}
    for kind in ("none", "4bit"):
        raw = run_of(model)
        raw["backend"]["options"]["quantization"] = kind
        estimate = memory(parse(raw, "c"), [])
        assert estimate is not None
        held[kind] = estimate.held["weights"]
    backend = quantized(model)
    parameters = [p for name, p in backend.policy.causal.named_parameters() if "lora" not in name]
    largest = 4 * 256 * 512  # bytes of one layer, expanded
    assert held["4bit"] - largest == pytest.approx(sum(p.nbytes for p in parameters), rel=0.04)  # scales
    assert held["none"] == 4 * open_backend(model, lora=False).info.parameters


def test_what_cannot_be_quantized_is_refused():
    wanted = {"quantization": "4bit"}
    assert check_options(wanted) == []
    assert check_options({**wanted, "lora": False}) == [
        "quantization: needs lora = true, because quantized weights cannot be trained"
    ]
    assert check_options({**wanted, "engine": "vllm"}) == [
        'quantization: needs engine = "torch", because the server would sample from other weights'
    ]
    assert check_options({"quantization": "8bit"}) == ["quantization: got '8bit'; needs 'none' or '4bit'"]
