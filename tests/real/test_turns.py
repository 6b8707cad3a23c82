"""Turns of a real language model: its own tokenizer and chat template."""

from __future__ import annotations

from retrain.backends.text import Text
from tests.extras.test_local_turns import take_random_turns
from tests.real.smollm2 import smollm2_tokenizer


def test_random_turns_are_never_tokenized_again() -> None:
    made = smollm2_tokenizer()
    text = Text(made, "SmolLM2", chat=True, system="")
    take_random_turns(text, made, [*range(100, len(made))])
