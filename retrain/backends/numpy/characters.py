"""The character vocabulary: the task's alphabet, then one end token.

The policy predicts the end token but never gets it as input.
"""

from __future__ import annotations

import numpy as np

from retrain.demonstrations import Demonstration
from retrain.errors import ConfigError
from retrain.rollouts import Rollout


class Characters:
    """Maps text to token ids and back."""

    def __init__(self, alphabet: str) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        if not self.alphabet:
            raise ConfigError("the numpy backend needs a task with an alphabet of at least one character")
        self.end = len(self.alphabet)
        self.pieces = (*self.alphabet, "")  # token id -> text
        self._ids = {character: token for token, character in enumerate(self.alphabet)}

    def encode(self, text: str, where: str = "prompt ") -> tuple[int, ...]:
        """Return the token ids of a text; `where` is its location, for the error.

        Raises:
            ConfigError: the text contains a character outside the task's alphabet.
        """
        try:
            return tuple([self._ids[character] for character in text])
        except KeyError as error:
            raise ConfigError(
                f"{where}{text[:40]!r} holds {error.args[0]!r}, which is not in the task's alphabet; "
                "add it to the Task's `alphabet`"
            ) from None

    def written(self, demonstration: Demonstration) -> Rollout:
        """Return a written completion as a rollout with end token.

        Raises:
            ConfigError: a character is not in the task's alphabet, or the prompt is a conversation.
        """
        prompt = demonstration.prompt
        if prompt.messages:
            raise ConfigError(
                f"[warmup].path: row {prompt.id} is a conversation, which needs a chat template"
            )
        row = f"[warmup].path: row {prompt.id}: "
        self.encode(prompt.text, row)
        tokens = (*self.encode(demonstration.completion, row), self.end)
        pieces = tuple([self.pieces[token] for token in tokens])
        return Rollout(
            prompt, demonstration.completion, tokens, np.zeros(len(tokens)), pieces, truncated=False
        )
