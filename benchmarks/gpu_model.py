"""Models of random weights, and what the parts of `benchmarks.gpu` do with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from retrain.backends import BackendSpec, MemoryEstimate, local
from retrain.base.rollouts import Prompt
from retrain.config.schema import BackendSection, Config, ModelSection, TrainingSection

if TYPE_CHECKING:
    from retrain.backends.local.policy import LocalBackend

RANK = 16


@dataclass(frozen=True)
class Size:
    """A model of random weights, and the work that it is given."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    vocabulary: int
    prompts: int
    group: int
    prompt_tokens: int
    tokens: int  # of a completion
    steps: int  # of a run
    matrix: int  # rows of the matrices that are multiplied to measure the peak
    copied_mb: int

    @property
    def rows(self) -> int:
        return self.prompts * self.group


SIZES = {
    "small": Size(64, 128, 2, 4, 512, 8, 8, 32, 32, 2, 512, 32),
    "0.6": Size(1024, 3072, 28, 16, 151_936, 16, 8, 128, 256, 6, 8192, 2048),
    "1.7": Size(2048, 6144, 28, 16, 151_936, 16, 8, 128, 256, 6, 8192, 2048),
}


@dataclass(frozen=True)
class Setup:
    """What a part is measured on."""

    device: str
    size: Size
    directory: Path
    runs: Sequence[int] = ()
    peaks: Sequence[float] = ()  # GFLOP/s and GB/s, if they are known
    options: dict[str, Any] = field(default_factory=dict)  # of the backend

    @property
    def has_goals(self) -> bool:
        return self.size is not SIZES["small"]

    @property
    def model(self) -> str:
        return str(self.directory / "model")

    @property
    def backend_options(self) -> dict[str, Any]:
        return {"device": self.device, "local_files_only": True, **self.options}

    def prompts(self) -> list[Prompt]:
        """Return distinct prompts of as many tokens each."""
        draw = np.random.default_rng(0)
        words = draw.integers(2, self.size.vocabulary, (self.size.prompts, self.size.prompt_tokens))
        return [Prompt(number, " ".join(f"w{i}" for i in row), "") for number, row in enumerate(words)]

    def connected(self) -> LocalBackend:
        """Return the product's own backend, whose completions all have their full length."""
        backend = local.connect(
            BackendSpec(seed=0, model=self.model, lora_rank=RANK, options=self.backend_options)
        )
        backend.text.end_ids = ()
        return backend

    def estimated(self) -> MemoryEstimate:
        """Return the product's own estimate of what a run takes."""
        size = self.size
        config = Config(
            model=ModelSection(model=self.model, lora_rank=RANK),
            training=TrainingSection(batch_size=size.prompts, group_size=size.group, max_tokens=size.tokens),
            backend=BackendSection(backend="local", options=self.backend_options),
        )
        found = local.memory(config, self.prompts())
        assert found is not None
        return found


def save_model(setup: Setup) -> int:
    """Save the model and its tokenizer, of as many words as it has embeddings; return its parameters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    size = setup.size
    words = {"<eos>": 0, "<pad>": 1} | {f"w{number}": number for number in range(2, size.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        head_dim=128 if setup.has_goals else size.hidden // size.heads,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    with torch.device(setup.device):
        made = Qwen3ForCausalLM(config)
    made.to(torch.bfloat16).save_pretrained(setup.model)
    wrapped.save_pretrained(setup.model)
    return sum(p.numel() for p in made.parameters())
