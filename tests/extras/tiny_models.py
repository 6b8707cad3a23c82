"""Tiny models made on the spot and saved as a hub would have them: nothing is downloaded."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHARACTERS = "0123456789=abcdefghijklmnopqrstuvwxyz "


def character_tokenizer(eos: str | None = "<eos>", characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token per character."""
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, pad_token="<pad>")


def save_tiny_model(
    directory: Path,
    *,
    hidden: int = 128,
    layers: int = 2,
    context: int = 128,
    vocabulary: int | None = None,
    eos: str | None = "<eos>",
    characters: str = CHARACTERS,
    warm_up_steps: int = 0,
    seed: int = 0,
) -> str:
    """Save a Qwen3-shaped model with its tokenizer; give its path.

    Args:
        warm_up_steps: of training on `39=` -> any of the ten numbers around 39, so that answers have their
            form and one in ten is right: adapters on a raw random model hardly learn.
    """
    tokenizer = character_tokenizer(eos, characters)
    config = Qwen3Config(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        _warm_up(model, tokenizer, warm_up_steps, random.Random(seed))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


def _warm_up(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, choice: random.Random
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        numbers = [choice.randrange(100) for _ in range(64)]
        texts = [f"{number}={abs(number + choice.randint(-4, 5))}<eos>" for number in numbers]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        ids, mask = batch["input_ids"], batch["attention_mask"]
        labels = ids.masked_fill(mask == 0, -100)
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
