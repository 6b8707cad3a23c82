"""Encodes prompts and decodes completions with the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from retrain.backends.local.options import LocalOptions
from retrain.backends.text import prompt_tokens
from retrain.demonstrations import Demonstration
from retrain.engines import Drawn
from retrain.errors import ConfigError
from retrain.rollouts import Prompt, Rollout

SHOWN = 3  # prompts named in an error about length
SPARE_TOKENS = 4  # checked beyond a stop string's bytes, because some tokens have no text


class Text:
    """Encoding, end tokens and stop strings of one model.

    Raises:
        ConfigError: the tokenizer has no end-of-sequence token, or lacks the requested chat template.
    """

    def __init__(self, model: str, tokenizer: Any, causal: Any, options: LocalOptions) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._vocabulary = len(causal.get_input_embeddings().weight)
        self._chat = options.chat_template
        self._system = options.system_prompt
        self._stop = options.stop
        self._pieces: dict[int, str] = {}
        self.end_ids = _end_ids(model, tokenizer, causal.generation_config)
        self._special = set(tokenizer.all_special_ids) | set(self.end_ids)
        self._anchor = self._ordinary_token()
        self._anchor_length = len(self._decode_all([[self._anchor]])[0])
        # a token covers at least one byte, so this many always contain the longest stop string
        self._window = max((len(stop.encode()) for stop in self._stop), default=0) + SPARE_TOKENS
        if self._chat and not tokenizer.chat_template:
            raise ConfigError(
                f"[backend.options].chat_template: the tokenizer of {model!r} has none; set it to false"
            )

    @property
    def stops(self) -> bool:
        """Whether there are stop strings."""
        return bool(self._stop)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return a prompt's token ids.

        Raises:
            ConfigError: there are none, the chat template fails, or the model does not know a token.
        """
        ids = prompt_tokens(self._tokenizer, prompt, self.end_ids, chat=self._chat, system=self._system)
        self._check_known(ids)
        return ids

    def written(self, demonstration: Demonstration) -> Rollout:
        """Return a written completion as a rollout that ends with the tokenizer's end token.

        Raises:
            ConfigError: the model does not know a token.
        """
        ids = self._tokenizer(demonstration.completion, add_special_tokens=False)["input_ids"]
        tokens = (*ids, int(self._tokenizer.eos_token_id or self.end_ids[0]))
        self._check_known(tokens)
        text, pieces = demonstration.completion, self.pieces(tokens)
        return Rollout(demonstration.prompt, text, tokens, np.zeros(len(tokens)), pieces, truncated=False)

    def is_stopped(self, tails: Sequence[Sequence[int]]) -> list[bool]:
        """Return for each completion so far whether its last tokens contain a stop string."""
        shown = self._decode_all([tail[-self._window :] for tail in tails])
        return [any(stop in text for stop in self._stop) for text in shown]

    def completions(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Return the completions' texts without end token, cut before a stop string."""
        return [self._until_stop(text) for text in self._decode_all(tokens)]

    def pieces(self, tokens: Sequence[int]) -> tuple[str, ...]:
        """Return each token's text; a special token's is empty."""
        return tuple([self._pieces[t] if t in self._pieces else self._piece(t) for t in tokens])

    def _check_known(self, ids: Sequence[int]) -> None:
        if max(ids) >= self._vocabulary:
            raise ConfigError(
                f"[model].model: the tokenizer of {self._model!r} gives token {max(ids)}, and the model "
                f"knows {self._vocabulary}: they do not belong together"
            )

    def _piece(self, token: int) -> str:
        # decoded after another token, because some tokenizers drop the space before the first word
        (text,) = self._decode_all([[self._anchor, token]])
        return self._pieces.setdefault(token, text[self._anchor_length :])

    def _ordinary_token(self) -> int:
        """Return a token of whole letters or digits, which decoding does not strip."""
        for token in range(len(self._tokenizer)):
            (text,) = self._decode_all([[token]])
            if text.isascii() and text.isalnum():
                return token
        return 0

    def _until_stop(self, text: str) -> str:
        cuts = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        return text[: min(cuts)] if cuts else text

    def _decode_all(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row, without special and end tokens."""
        shown = [[token for token in row if token not in self._special] for row in rows]
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is not None:  # one call for all rows is ten times faster
            return list(fast.decode_batch(shown, skip_special_tokens=False))
        return [str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for ids in shown]


def _end_ids(model: str, tokenizer: Any, generation_config: Any) -> tuple[int, ...]:
    """Return all token ids that end a completion; chat models often have two."""
    listed = getattr(generation_config, "eos_token_id", None)
    ids = listed if isinstance(listed, list) else [listed]
    found = sorted({int(i) for i in [tokenizer.eos_token_id, *ids] if i is not None})
    if not found:
        raise ConfigError(
            f"[model].model: the tokenizer of {model!r} has no end-of-sequence token, so completions could "
            "not end; set eos_token in its tokenizer_config.json"
        )
    return tuple(found)


def to_rollouts(
    text: Text, prompts: Sequence[Prompt], drawn: Sequence[Drawn], group_size: int, version: int
) -> Iterator[Rollout]:
    """Return sampled completions as rollouts, `group_size` per prompt; `version` is the policy version."""
    texts = text.completions([one.tokens for one in drawn])
    for number, (one, words) in enumerate(zip(drawn, texts, strict=True)):
        yield Rollout(
            prompt=prompts[number // group_size],
            text=words,
            tokens=one.tokens,
            logprobs=one.logprobs,
            pieces=text.pieces(one.tokens),
            truncated=not one.ended,
            policy_version=version,
            mean_entropy=one.entropy,
        )


def check_room(tokens: Mapping[int, int], context: int) -> None:
    """Reject prompts that leave no room for a completion.

    Args:
        tokens: number of tokens of each prompt, by prompt id.
        context: the model's limit in tokens.

    Raises:
        ConfigError: names the first few such prompts.
    """
    long = [(number, length) for number, length in tokens.items() if length >= context]
    if long:
        shown = ", ".join(f"prompt {number} has {length}" for number, length in long[:SHOWN])
        raise ConfigError(
            f"[data]: {len(long)} prompts fill the model's context of {context} tokens ({shown}); "
            "shorten them or use a model with a longer context"
        )


def check_written(rollout: Rollout, prompt_tokens: int, context: int) -> None:
    """Reject a written completion that does not fit in the context with its prompt.

    Raises:
        ConfigError: names the row.
    """
    length = prompt_tokens + len(rollout.tokens)
    if length > context:
        raise ConfigError(
            f"[warmup].path: row {rollout.prompt.id} has {length} tokens, more than the "
            f"model's context of {context}; shorten it"
        )
