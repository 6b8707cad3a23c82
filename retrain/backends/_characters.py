"""The character vocabulary: the task's alphabet, then one token that ends a sequence.

Prompts are encoded as they are; the policy is never shown the end token, only asked for it.
"""

from __future__ import annotations

from retrain.errors import ConfigError


class Characters:
    """Text to token ids and back."""

    def __init__(self, alphabet: str) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        if not self.alphabet:
            raise ConfigError("the numpy backend needs a task with an alphabet of at least one character")
        self.end = len(self.alphabet)
        self.pieces = (*self.alphabet, "")  # token id -> text
        self._ids = {character: token for token, character in enumerate(self.alphabet)}

    def encode(self, text: str) -> tuple[int, ...]:
        """Give the token ids of a prompt.

        Raises:
            ConfigError: the text holds a character that the task's alphabet lacks.
        """
        try:
            return tuple([self._ids[character] for character in text])
        except KeyError as error:
            raise ConfigError(
                f"prompt {text[:40]!r} holds {error.args[0]!r}, which is not in the task's alphabet; "
                "add it to the Task's `alphabet`"
            ) from None
