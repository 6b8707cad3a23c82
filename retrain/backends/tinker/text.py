"""The tokenizer of a remote model, run locally because the API only handles token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.backends.text import prompt_tokens
from retrain.backends.tinker.options import TinkerOptions
from retrain.backends.tinker.session import Session
from retrain.blocking import in_thread
from retrain.demonstrations import Demonstration
from retrain.errors import ConfigError
from retrain.rollouts import Prompt, Rollout


class Text:
    """Encodes prompts to token ids, and decodes completions to text."""

    def __init__(self, tokenizer: Any, options: TinkerOptions) -> None:
        """Wrap a transformers tokenizer.

        Raises:
            ConfigError: it has no end-of-sequence token, or lacks the requested chat template.
        """
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                "[backend.options].tokenizer: has no end-of-sequence token, so completions could not end; "
                "set eos_token in its tokenizer_config.json"
            )
        if options.chat_template and not tokenizer.chat_template:
            raise ConfigError("[backend.options].chat_template: the tokenizer has none; set it to false")
        self.end = int(tokenizer.eos_token_id)
        self._tokenizer = tokenizer
        self._chat = options.chat_template
        self._system = options.system_prompt
        self._pieces: dict[int, str] = dict.fromkeys(tokenizer.all_special_ids, "") | {self.end: ""}
        self._anchor = next(token for token in range(len(tokenizer) + 1) if token not in self._pieces)
        self._anchor_length = len(self.decode([self._anchor]))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return a prompt's token ids.

        Raises:
            ConfigError: there are none, or the chat template fails.
        """
        return prompt_tokens(self._tokenizer, prompt, (self.end,), chat=self._chat, system=self._system)

    def written(self, demonstration: Demonstration) -> Rollout:
        """Return a written completion as a rollout with end token."""
        ids = self._tokenizer.encode(demonstration.completion, add_special_tokens=False)
        tokens, text = (*ids, self.end), demonstration.completion
        pieces = self.pieces(tokens)
        return Rollout(demonstration.prompt, text, tokens, np.zeros(len(tokens)), pieces, truncated=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return a completion's text, without special tokens."""
        return str(
            self._tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def pieces(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return each token's text; a special token's is empty."""
        for token in set(tokens) - self._pieces.keys():
            # after another token, because some tokenizers drop the space before the first word
            self._pieces[token] = self.decode([self._anchor, token])[self._anchor_length :]
        return tuple([self._pieces[token] for token in tokens])


class LazyText:
    """Loads the tokenizer once, on first use."""

    def __init__(self, model: str, options: TinkerOptions, session: Session) -> None:
        self._model = model
        self._options = options
        self._session = session
        self._lock = asyncio.Lock()
        self._text: Text | None = None

    async def get(self) -> Text:
        """Return the tokenizer.

        Raises:
            ConfigError: it cannot be loaded, or lacks an end token or a chat template.
        """
        async with self._lock:
            if self._text is None:
                self._text = Text(await self._load(), self._options)
            return self._text

    async def _load(self) -> Any:
        name = self._options.tokenizer
        try:
            return await (in_thread(lambda: _from_files(name)) if name else self._session.tokenizer())
        except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
            which = repr(name) if name else f"of {self._model!r}"
            raise ConfigError(
                f"[backend.options].tokenizer: the tokenizer {which} cannot be loaded "
                f"({type(error).__name__}: {str(error)[:300]}); name a local directory or a hub id"
            ) from error


def _from_files(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)
