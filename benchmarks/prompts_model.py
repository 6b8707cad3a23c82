"""The language model of `benchmarks.prompts`: a small Qwen3 of characters, trained here on sums."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.prompts import summed

HIDDEN, LAYERS, BATCH = 64, 2, 64
LENGTHS = (1, 2, 2, 3)  # of the numbers of its sums
WRONG = {1: 0.0, 2: 0.3, 3: 0.5}  # of the digits of their answers, by that length
STEPS, RIGHT_STEPS = 1000, 800  # of training; of them on right answers, before those with wrong digits


def demonstration(rng: random.Random, *, is_right: bool) -> str:
    digits = rng.choice(LENGTHS)
    question, answer = summed(digits, rng)
    wrong = 0.0 if is_right else WRONG[digits]
    shown = (rng.choice("0123456789") if rng.random() < wrong else digit for digit in answer)
    return f"{question}{''.join(shown)}<eos>"


def save_model(
    directory: Path,
    hidden: int = HIDDEN,
    right_steps: int = RIGHT_STEPS,
    demonstrate: Callable[..., str] = demonstration,
) -> None:
    """Save a model, with its tokenizer, that masters short sums and rarely solves long ones.

    With `right_steps = STEPS` it has seen right answers alone, and solves most.
    """
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokens.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<eos>", pad_token="<pad>")
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=hidden // 4,
        max_position_embeddings=32,
        initializer_range=0.1,
        eos_token_id=words["<eos>"],
        bos_token_id=None,
        pad_token_id=words["<pad>"],
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS)
    rng = random.Random(0)
    for step in range(STEPS):
        texts = [demonstrate(rng, is_right=step < right_steps) for _ in range(BATCH)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        ids, mask = batch["input_ids"], batch["attention_mask"]
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
