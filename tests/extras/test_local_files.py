"""Checkpoints of the local backend: bit for bit, readable by peft and transformers, refused when wrong."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import tomli_w
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from retrain.backends import Optimization
from retrain.base.errors import RecordsError, may_pass
from retrain.config.load import parse
from retrain.config.resolve import as_tables
from retrain.plan.build import plan_runs
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.trainer import checkpoint, worker
from tests.extras.local_policies import as_samples, draw, loss_named, open_backend, plain_logprobs
from tests.extras.tiny_models import save_tiny_model
from tests.full_disk import files_of_at_most
from tests.stopping import StopAfterStep

HOW = Optimization(lr=1e-2, temperature=0.8, wants_moments=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64)


def learn(backend, steps: int) -> list[tuple]:
    """Take steps; give everything that could differ."""
    seen = []
    for step in range(steps):
        samples = as_samples(draw(backend), seed=step)
        stats = backend.update(samples, loss_named("ppo"), HOW)
        noise = stats.moments and (stats.moments.local_sqr_norms.tolist(), stats.moments.consecutive)
        seen.append((stats.loss, stats.grad_norm, noise, [s.rollout.tokens for s in samples]))
    return seen


def weights(backend) -> dict[str, bytes]:
    tensors = {**backend.optimizer.state(), **backend.policy.trainable()}
    return {name: bytes(t.detach().contiguous().view(torch.uint8).numpy()) for name, t in tensors.items()}


@pytest.mark.parametrize("options", [{}, {"lora": False}, {"lora": False, "dtype": "bfloat16"}], ids=str)
def test_a_loaded_policy_goes_on_bit_for_bit(model, tmp_path, options):
    first = open_backend(model, **options)
    learn(first, 5)  # from the fifth on, a step's gradient is compared with the one before
    first.save(tmp_path)
    second = open_backend(model, seed=9, **options)
    second.load(tmp_path)
    assert learn(second, 3) == learn(first, 3)
    assert weights(second) == weights(first)


def test_two_backends_of_a_seed_learn_alike_bit_for_bit(model):
    one, two = open_backend(model), open_backend(model)
    assert learn(one, 3) == learn(two, 3)
    assert weights(one) == weights(two)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # peft's own
def test_adapters_are_what_peft_reads(model, tmp_path):
    backend = open_backend(model)
    learn(backend, 2)
    backend.save(tmp_path)
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), tmp_path / "adapter"
    )
    samples = as_samples(draw(backend))
    for sample, logps in zip(samples, plain_logprobs(backend, samples, 1.0), strict=True):
        prompt = backend.text.encode(sample.rollout.prompt)
        with torch.no_grad():
            logits = theirs(input_ids=torch.tensor([[*prompt, *sample.rollout.tokens]])).logits
        assert torch.allclose(logits[0, len(prompt) - 1 : -1].log_softmax(-1), logps, atol=1e-5)


def test_adapters_name_the_revision_of_their_base_model(model, tmp_path):
    open_backend(model, revision="v2").save(tmp_path)  # of no meaning for a directory
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (model, "v2")


def test_a_whole_model_is_what_transformers_reads(model, tmp_path):
    backend = open_backend(model, lora=False)
    learn(backend, 1)
    backend.save(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(t, theirs[name]) for name, t in backend.policy.causal.state_dict().items())


def test_nothing_is_pickled(model, tmp_path):
    backend = open_backend(model)
    backend.save(tmp_path)
    kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
    assert kinds <= {".json", ".safetensors", ".md"}
    json.loads((tmp_path / "local.json").read_text())
    assert load_file(tmp_path / "optimizer.safetensors")


def test_a_checkpoint_of_another_rank_is_refused(model, tmp_path):
    open_backend(model, rank=4).save(tmp_path)
    with pytest.raises(RecordsError, match=r"lora_rank is 4, the run's is 8"):
        open_backend(model, rank=8).load(tmp_path)


@pytest.mark.parametrize("name", ["local.json", "optimizer.safetensors", "adapter/adapter_model.safetensors"])
def test_a_damaged_checkpoint_is_refused(model, tmp_path, name):
    backend = open_backend(model)
    backend.save(tmp_path)
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(RecordsError, match="not a readable checkpoint"):
        backend.load(tmp_path)


def test_a_checkpoint_of_another_kind_of_device_is_told_from_a_damaged_one(model, tmp_path):
    backend = open_backend(model)
    backend.save(tmp_path)
    facts = json.loads((tmp_path / "local.json").read_text())
    facts["generator"] = "00" * 16  # as a GPU's
    (tmp_path / "local.json").write_text(json.dumps(facts))
    with pytest.raises(RecordsError, match="from another kind of device than cpu"):
        backend.load(tmp_path)


@pytest.mark.parametrize("name", ["adapter/adapter_model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("change", ["lost", "cut"])
def test_a_checkpoint_whose_tensors_are_not_all_there_is_refused(model, tmp_path, name, change):
    backend = open_backend(model)
    learn(backend, 1)
    backend.save(tmp_path)
    tensors = load_file(tmp_path / name)
    first = sorted(tensors)[0]
    if change == "cut":
        tensors[first] = tensors[first][:2].clone()
    else:
        del tensors[first]
    save_file(tensors, tmp_path / name)
    with pytest.raises(RecordsError, match="not a readable checkpoint"):
        open_backend(model).load(tmp_path)


def make_run(directory: Path, model: str, *, eval_every: int = 0, eval_samples: int = 1) -> RunFiles:
    raw = {
        "model": {"model": model, "lora_rank": 4},
        "backend": {"backend": "local", "options": {"local_files_only": True, "device": "cpu"}},
        "training": {
            "seed": 5,
            "max_steps": 4,
            "batch_size": 2,
            "group_size": 4,
            "max_tokens": 4,
            "lr": 1e-2,
            "eval_every": eval_every,
        },
        "data": {"task": "successor", "eval_samples": eval_samples},
        "reward": {"reward": "partial"},
    }
    directory.mkdir()
    files = RunFiles(directory)
    files.run_toml.write_text(tomli_w.dumps(as_tables(plan_runs(parse(raw, "c")).runs[0].config)))
    return files


def test_a_run_that_was_stopped_ends_as_the_undisturbed_one(model, tmp_path):
    whole, broken = make_run(tmp_path / "whole", model), make_run(tmp_path / "broken", model)
    assert worker.run(whole.directory, threading.Event()) == 0
    assert worker.run(broken.directory, StopAfterStep(broken, 2)) == 130
    assert worker.run(broken.directory, threading.Event()) == 0
    kept = ("step", "loss", "mean_reward", "grad_norm", "entropy", "tokens_per_step")
    rows = [[{k: r[k] for k in kept} for r in read_metrics(f.directory)] for f in (whole, broken)]
    assert rows[0] == rows[1]
    ends = [checkpoint.newest(files.checkpoints).directory for files in (whole, broken)]
    for name in ("optimizer.safetensors", "adapter/adapter_model.safetensors", "local.json"):
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes()


def test_a_run_that_is_measured_is_the_run_that_is_not(model, tmp_path):
    often = make_run(tmp_path / "often", model, eval_every=1, eval_samples=2)
    never = make_run(tmp_path / "never", model)
    ends = []
    for files in (often, never):
        assert worker.run(files.directory, threading.Event()) == 0
        ends.append(checkpoint.newest(files.checkpoints).directory)
    for name in ("optimizer.safetensors", "adapter/adapter_model.safetensors", "local.json"):
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes()


def test_a_full_disk_is_told_as_one_that_may_be_freed(model, tmp_path):
    policy, told = open_backend(model), r"cannot write the checkpoint \(File too large\)"
    with files_of_at_most(16_000), pytest.raises(RecordsError, match=told) as error:
        checkpoint.save(tmp_path, 1, {}, policy.save, keep=2)
    assert may_pass(error.value)
    assert [*tmp_path.iterdir()] == []
