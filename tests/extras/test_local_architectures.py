"""Models of other shapes: what differs is found in the model, not asked of the user."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma4Config,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GraniteConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PhimoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    RecurrentGemmaConfig,
)

from retrain.backends import SELF, Optimization, TeacherSpec
from retrain.base.errors import ConfigError
from tests.extras.local_policies import (
    as_samples,
    chosen,
    draw,
    loss_named,
    open_backend,
    plain_logprobs,
    stir,
)
from tests.extras.tiny_models import character_tokenizer

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}
GQA = {**SHAPE, "num_key_value_heads": 2}
OLD = {"vocab_size": 40, "hidden_size": 32, "eos_token_id": 1, "initializer_range": 0.1}
OWN_ATTENTION: dict[str, PretrainedConfig] = {
    "local attention": GPTNeoConfig(
        **OLD,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=6,
        max_position_embeddings=64,
        bos_token_id=None,
    ),
    "biases by distance": BloomConfig(**OLD, n_layer=2, n_head=4, bos_token_id=None),
    "rotary": FalconConfig(**OLD, num_hidden_layers=2, num_attention_heads=4, alibi=False, bos_token_id=None),
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**GQA),
    "dropout and joined projections": GPT2Config(
        vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=1, initializer_range=0.1
    ),
    "rotary in part": GPTJConfig(
        vocab_size=40,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        rotary_dim=4,
        eos_token_id=1,
        bos_token_id=None,
        initializer_range=0.1,
    ),
    "parallel layers": GPTNeoXConfig(**SHAPE, attention_dropout=0.5, hidden_dropout=0.5),
    "sliding windows": MistralConfig(**GQA, sliding_window=6),
    "capped logits": Gemma2Config(**GQA, head_dim=8, sliding_window=6, final_logit_softcapping=3.0),
    "layers of two widths, in a model that may see and hear": Gemma4Config(
        text_config={
            **GQA,
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 6,
            "vocab_size_per_layer_input": 40,
            "final_logit_softcapping": 3.0,
        },
        vision_config=None,
        audio_config=None,
    ),
    "scaled logits": CohereConfig(**GQA, logit_scale=0.3),
    "divided logits": GraniteConfig(**GQA, logits_scaling=3.0),
    "experts": Qwen2MoeConfig(
        **GQA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
}


def save(config: PretrainedConfig, directory: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    character_tokenizer().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_samples_and_learns_whatever_its_shape(name: str, tmp_path: Path) -> None:
    save(CONFIGS[name], tmp_path)
    backend = open_backend(tmp_path)
    stir(backend)
    samples = as_samples(draw(backend))
    for sample, logps in zip(samples, plain_logprobs(backend, samples, 0.8), strict=True):
        assert np.allclose(chosen(logps, sample).detach(), sample.rollout.logprobs, atol=1e-4)
    stats = backend.update(samples, loss_named("ppo"), Optimization(lr=1e-3, temperature=0.8))
    assert stats.clip_fraction == 0.0  # the trainer sees the sampler's log-probabilities
    assert stats.grad_norm > 0


READS_EMBEDDINGS = "layers of two widths, in a model that may see and hear"  # without calling them


@pytest.mark.parametrize("name", [READS_EMBEDDINGS, "experts", "dropout and joined projections"])
def test_a_teacher_is_offloaded_whatever_its_shape(name: str, tmp_path: Path) -> None:
    backend = open_backend(save(CONFIGS[name], tmp_path), lora=False, teacher_offload=True)
    samples = as_samples(draw(backend))
    teacher = backend.open_teacher(TeacherSpec(SELF, 0.8, is_whole=False))
    assert any(p.is_meta for p in teacher._policy.causal.parameters())
    scores = teacher.score([sample.rollout for sample in samples])
    for sample, score in zip(samples, scores, strict=True):
        assert np.allclose(score.logprobs, sample.rollout.logprobs, atol=1e-4)


def test_recomputed_activations_are_without_the_noise_of_training(tmp_path: Path) -> None:
    save(MixtralConfig(**GQA, num_local_experts=4, router_jitter_noise=0.3), tmp_path)
    backend, ran = open_backend(tmp_path, gradient_checkpointing=True), []
    samples = as_samples(draw(backend))
    first = backend.policy.causal.base_model.layers[0].self_attn.q_proj
    first.register_forward_pre_hook(lambda *_: ran.append(1))
    stats = backend.update(samples, loss_named("ppo"), Optimization(lr=1e-3, temperature=0.8))
    assert stats.mismatch is not None
    assert stats.mismatch.max < 1e-4
    assert len(ran) == 2  # forward, and again for the gradient


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_rows_join_a_model_that_computes_attention_by_itself(name: str, tmp_path: Path) -> None:
    save(OWN_ATTENTION[name], tmp_path)
    backend = open_backend(tmp_path, tokens_per_sampling_batch=90)
    assert backend.sampler.windows is not None
    assert backend.sampler.windows.is_whole
    stir(backend)
    samples = as_samples(draw(backend, group_size=6, max_tokens=30))
    for sample, logps in zip(samples, plain_logprobs(backend, samples, 0.8), strict=True):
        assert np.allclose(chosen(logps, sample).detach(), sample.rollout.logprobs, atol=1e-4)


def test_a_model_whose_cache_cannot_be_split_by_rows_is_sampled_in_passes(tmp_path: Path) -> None:
    save(Lfm2Config(**GQA, layer_types=["conv", "full_attention"]), tmp_path)
    backend = open_backend(tmp_path)
    assert backend.sampler.windows is None
    stir(backend)
    samples = as_samples(draw(backend, group_size=6, max_tokens=30))
    for sample, logps in zip(samples, plain_logprobs(backend, samples, 0.8), strict=True):
        assert np.allclose(chosen(logps, sample).detach(), sample.rollout.logprobs, atol=1e-4)


def test_experts_that_a_token_is_not_sent_to_cost_no_arithmetic(tmp_path: Path) -> None:
    costs = open_backend(save(CONFIGS["experts"], tmp_path), lora=False).costs
    routed = 2 * 4 * 3 * 32 * 32  # layers, experts, and each one's gate, up and down
    assert costs.idle == routed // 2


def test_a_model_that_a_cache_changes_is_refused_rather_than_trained_on_wrong_numbers(tmp_path: Path) -> None:
    keeps_its_state_in_itself = RecurrentGemmaConfig(
        **GQA, lru_width=32, attention_window_size=6, block_types=["recurrent", "attention"]
    )
    with pytest.raises(ConfigError, match="has other logits with a cache"):
        open_backend(save(keeps_its_state_in_itself, tmp_path))


def test_layers_that_adapters_break_are_told_of_with_what_may_help(tmp_path: Path) -> None:
    model = save(PhimoeConfig(**GQA, num_local_experts=4, num_experts_per_tok=2), tmp_path)
    with pytest.raises(ConfigError, match=r"target_modules = \["):
        open_backend(model)
    backend = open_backend(model, target_modules=["q_proj", "v_proj"])
    assert draw(backend)


def test_layers_that_text_never_passes_get_no_adapters(tmp_path: Path) -> None:
    sees = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sees |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config={**GQA, "head_dim": 8}, vision_config=sees)
    model = save(config, tmp_path / "m")
    backend = open_backend(model)
    stir(backend)
    assert len(backend.policy.trainable()) == 2 * 7 * 2  # of each of two layers' seven projections
    assert all("language_model" in name for name in backend.policy.trainable())
    head = open_backend(model, target_modules=["q_proj", "lm_head"]).policy.trainable()
    assert len(head) == 2 * 2 + 2
    backend.save(tmp_path / "c")
    file = tmp_path / "c/adapter/adapter_model.safetensors"
    tensors = load_file(file)
    seen = {name.replace("language_model", "vision_tower"): one.clone() for name, one in tensors.items()}
    save_file(tensors | seen, file)  # as other programs have them
    again = open_backend(model)
    again.load(tmp_path / "c")
    assert [p.tolist() for p in again.policy.trainable().values()] == [
        p.tolist() for p in backend.policy.trainable().values()
    ]
