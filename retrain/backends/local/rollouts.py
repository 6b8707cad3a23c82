"""Rollouts of what was drawn, and whether prompts and written completions fit into a model's context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from retrain.backends.local.text import Text
from retrain.engines import Drawn
from retrain.errors import ConfigError
from retrain.rollouts import Prompt, Rollout

SHOWN = 3  # of the prompts that are too long


def to_rollouts(
    text: Text, prompts: Sequence[Prompt], drawn: Sequence[Drawn], group_size: int, version: int
) -> Iterator[Rollout]:
    """Return each draw its prompt and its words; `version` is the policy's."""
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
    """Refuse prompts that leave no room for a completion.

    Args:
        tokens: of each prompt, by its id.
        context: tokens that the model can see.

    Raises:
        ConfigError: names the first few of them.
    """
    long = [(number, length) for number, length in tokens.items() if length >= context]
    if long:
        shown = ", ".join(f"prompt {number} has {length}" for number, length in long[:SHOWN])
        raise ConfigError(
            f"[data]: {len(long)} prompts fill the model's context of {context} tokens ({shown}); "
            "shorten them or use a model with a longer context"
        )


def check_written(rollout: Rollout, prompt_tokens: int, context: int) -> None:
    """Refuse a written completion that does not fit behind its prompt.

    Raises:
        ConfigError: names its row.
    """
    length = prompt_tokens + len(rollout.tokens)
    if length > context:
        raise ConfigError(
            f"[warmup].path: row {rollout.prompt.id} has {length} tokens, more than the "
            f"model's context of {context}; shorten it"
        )
