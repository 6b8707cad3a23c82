"""Token ids of a prompt from a transformers tokenizer, with or without its chat template."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from retrain.errors import ConfigError
from retrain.rollouts import Prompt


def prompt_tokens(
    tokenizer: Any, prompt: Prompt, ends: Collection[int], *, chat: bool, system: str
) -> tuple[int, ...]:
    """Return a prompt's token ids, ready to be followed by a completion.

    Args:
        tokenizer: may add special tokens; end tokens at the end are removed.
        prompt: text, or messages if `chat` is set.
        ends: token ids that end a completion.
        chat: apply the tokenizer's chat template.
        system: system prompt for the template; "" for none.

    Raises:
        ConfigError: the prompt has no token, is a conversation without `chat`, or its template fails.
    """
    if chat:
        # the template has already written the special tokens
        ids = tokenizer(_shown(tokenizer, prompt, system), add_special_tokens=False)["input_ids"]
    elif prompt.messages:
        raise ConfigError(
            f"[warmup].path: row {prompt.id} is a conversation; set [backend.options].chat_template = true"
        )
    else:
        ids = _without_added_end(tokenizer, prompt.text, ends)
    if not ids:
        raise ConfigError(f"[data]: prompt {prompt.id} is {prompt.text!r}, which has no token")
    return tuple(ids)


def _shown(tokenizer: Any, prompt: Prompt, system: str) -> str:
    before = [{"role": "system", "content": system}] if system else []
    messages = [*before, {"role": "user", "content": prompt.text}]
    if prompt.messages:
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # a template is a program and may raise anything
        advice = "try it without system_prompt" if system else "set it to false, or fix the template"
        raise ConfigError(
            f"[backend.options].chat_template: the tokenizer's template fails on prompt {prompt.id} "
            f"({type(error).__name__}: {error}); {advice}"
        ) from error


def _without_added_end(tokenizer: Any, text: str, ends: Collection[int]) -> list[int]:
    ids: list[int] = tokenizer(text)["input_ids"]
    if len(ids) < 2 or ids[-1] not in ends:
        return ids
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids if plain and plain[-1] in ends else ids[:-1]
