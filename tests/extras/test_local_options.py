"""What the local backend refuses, where it says the fault lies, and what it tells the planner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from retrain.backends import BackendSpec, Optimization
from retrain.backends.local import check_options, connect
from retrain.base.errors import ConfigError, RecordsError
from retrain.base.rollouts import Prompt
from tests.extras.local_policies import UNEVEN, as_samples, draw, loss_named, open_backend, stir
from tests.extras.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("devise", "cpu", "did you mean 'device'?"),
        ("device", "gpu", "'cuda:N'"),
        ("dtype", "float16", "needs 'auto', 'float32' or 'bfloat16'"),
        ("lora", 1, "true or false"),
        ("target_modules", [], "a list with 'all-linear'"),
        ("stop", "###", "a list of strings"),
        ("stop", [""], "none of them empty"),
        ("tokens_per_micro_batch", -1, "from 0"),
        ("tokens_per_micro_batch", 2.0, "whole number"),
        ("threads", True, "whole number"),
        ("weight_decay", -0.1, "a number from 0"),
        ("engine", "sglang", "'torch', 'vllm' or 'openai'"),
        ("engine_url", "127.0.0.1:8000", "an address without /v1, such as"),
        ("engine_url", "http://127.0.0.1:port", "an address"),
        ("engine_url", "http://127.0.0.1:99999", "an address"),
        ("engine_url", "http://[::1", "an address"),
        ("engine_url", "http://127.0.0.1:8000/v1/", "an address without /v1"),
        ("revision", 3, "a string"),
        ("chat_template_kwargs", True, "a table"),
    ],
)
def test_a_wrong_option_is_named_with_what_it_needs(key, value, words):
    (problem,) = check_options({key: value})
    assert problem.startswith(f"{key}: ")
    assert words in problem


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"system_prompt": "be brief"}, "system_prompt"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"engine": "openai"}, "engine_url"),
        ({"engine_spare": 0.5}, "engine_spare"),
        ({"engine": "openai", "engine_url": "http://h:1", "lora": False}, "engine"),
    ],
)
def test_options_that_exclude_each_other_are_told(options, key):
    assert [problem.partition(":")[0] for problem in check_options(options)] == [key]


def test_checking_options_imports_no_torch():
    code = (
        "import sys; from retrain.backends.local import check_options;"
        "assert check_options({'device': 'cuda:1'}) == [];"
        "assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"\(peft not found\): pip install .*\[local\]"):
        connect(BackendSpec(seed=0))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "empty; the local backend needs a hub id or a local path"),
        ("./nowhere", "'./nowhere' is no directory here"),
        ("no-such/model", "'no-such/model' is neither a directory nor in"),
        ("{empty}", "is a directory without config.json"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_named(name, words, tmp_path):
    with pytest.raises(ConfigError, match=r"\[model\].model") as caught:
        open_backend(name.format(empty=tmp_path))
    assert words in str(caught.value)


def test_a_gpu_that_is_not_there_is_refused(model):
    absent = f"cuda:{torch.cuda.device_count()}"
    with pytest.raises(ConfigError, match=f"got '{absent}'; this process sees"):
        open_backend(model, device=absent)


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    path = save_tiny_model(tmp_path, hidden=32, eos=None)
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        open_backend(path)


def test_a_chat_template_that_is_not_there_is_refused(model):
    with pytest.raises(ConfigError, match="chat_template: the tokenizer"):
        open_backend(model, chat_template=True)


def test_layers_that_are_not_there_are_refused(model):
    with pytest.raises(ConfigError, match="target_modules"):
        open_backend(model, target_modules=["no_proj"])


def test_a_prompt_without_tokens_is_refused(model):
    with pytest.raises(ConfigError, match="prompt 3 is ''"):
        open_backend(model).check_prompts([Prompt(3, "", "")])


def test_adapters_go_on_the_layers_named_with_alpha_twice_the_rank(model):
    backend = open_backend(model, rank=8, target_modules=["q_proj", "v_proj"])
    named = {name.split(".lora_")[0].rsplit(".", 1)[1] for name in backend.policy.trainable()}
    assert named == {"q_proj", "v_proj"}
    config = backend.policy.adapters.peft_config["default"]
    assert (config.r, config.lora_alpha) == (8, 16)


def test_alpha_scales_what_adapters_add(model, tmp_path):
    backends = [open_backend(model, rank=8, lora_alpha=alpha) for alpha in (0, 16.0, 4.0)]
    ids = torch.tensor([[2, 3, 4]])
    for backend in backends:
        stir(backend)
    default, same, weak = (backend.policy.causal(input_ids=ids).logits for backend in backends)
    assert torch.equal(default, same)
    assert not torch.allclose(default, weak)
    with torch.no_grad():
        for name, parameter in backends[2].policy.trainable().items():
            parameter *= 4 if "lora_B" in name else 1
    assert torch.allclose(backends[2].policy.causal(input_ids=ids).logits, default, atol=1e-5)
    backends[1].save(tmp_path)
    with pytest.raises(RecordsError, match=r"lora_alpha is 16\.0, the run's is 4\.0"):
        backends[2].load(tmp_path)


def test_work_and_memory_per_token_follow_from_the_shape(model):
    adapted, whole = open_backend(model), open_backend(model, lora=False)
    costs = whole.costs
    layer = 32 * (4 * 8) * 2 + 32 * (2 * 8) * 2 + 3 * 32 * 64  # q and o, k and v, gate up and down
    body, head = 2 * layer + 2 * (2 * 32 + 2 * 8) + 32, 40 * 32  # norms count as weights
    assert whole.info.parameters == body + head + 40 * 32  # and the embedding, which is looked up
    assert (costs.body, costs.head, costs.weight_bytes) == (body, head, 4)
    assert costs.kv_bytes_per_token == 2 * 2 * (2 * 8) * 4
    assert (costs.frozen, adapted.costs.frozen) == (False, True)
    assert adapted.info.deterministic
    assert not adapted.info.remote


def test_sampling_and_training_say_what_they_cost(model):
    backend = open_backend(model, lora=False, tokens_per_sampling_batch=10**6)
    costs, prompts = backend.costs, [len(backend.text.encode(prompt)) for prompt in UNEVEN]

    groups = draw(backend, UNEVEN, group_size=3, max_tokens=5)
    sampled = backend.take_sampling_work()
    trained = backend.update(as_samples(groups), loss_named("ppo"), Optimization(lr=1e-3)).work

    lengths = [len(rollout.tokens) for group in groups for rollout in group.rollouts]
    drawn, longest = sum(lengths), max(lengths)
    cached = sum((n - 1) * (p + n / 2) for p, n in zip(np.repeat(prompts, 3), lengths, strict=True))
    assert sampled.prefill.flops == 2 * costs.body * sum(prompts)  # each prompt once, not once per rollout
    assert sampled.prefill.bytes_moved == 4 * costs.body + costs.kv_bytes_per_token * sum(prompts)
    assert sampled.decode.flops == 2 * (costs.body * (drawn - 15) + costs.head * drawn)
    moved = 4 * (costs.body * (longest - 1) + costs.head * longest)
    assert sampled.decode.bytes_moved == moved + costs.kv_bytes_per_token * cached
    assert trained.flops == 6 * (costs.body * (sum(prompts) + drawn) + costs.head * drawn)
    assert min(sampled.prefill.time_s, sampled.decode.time_s, trained.time_s) > 0
    assert backend.take_sampling_work().decode.tokens == 0


def test_a_tiny_model_computes_on_one_thread_unless_told(model):
    before = torch.get_num_threads()
    try:
        open_backend(model)
        assert torch.get_num_threads() == 1
        open_backend(model, threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_path_with_a_home_directory_is_found(model, monkeypatch):
    monkeypatch.setenv("HOME", str(Path(model).parent))
    assert open_backend(f"~/{Path(model).name}").info.parameters > 0
