"""The vocabulary of the embedded policy: one token per character."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.engines import Ids
from retrain.errors import ConfigError, PromptError


class Characters:
    """The vocabulary: the task's alphabet, then one end token, which the policy predicts but never reads."""

    def __init__(self, alphabet: str) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        if not self.alphabet:
            raise ConfigError("the numpy backend needs a task with an alphabet of at least one character")
        self.end = len(self.alphabet)
        self._ids = {character: token for token, character in enumerate(self.alphabet)}
        self._pieces = (*self.alphabet, "")

    def encode(self, text: str, where: str = "prompt ") -> Ids:
        """Return the token ids of a text; an unknown character is a PromptError that begins with `where`."""
        try:
            return tuple([self._ids[character] for character in text])
        except KeyError as error:
            raise PromptError(
                f"{where}{text[:40]!r} holds {error.args[0]!r}, which is not in the task's alphabet; "
                "add it to the Task's `alphabet`"
            ) from None

    def completions(self, rows: Sequence[Ids]) -> list[str]:
        return ["".join(self.pieces(row)) for row in rows]

    def pieces(self, tokens: Ids) -> tuple[str, ...]:
        return tuple([self._pieces[token] for token in tokens])
