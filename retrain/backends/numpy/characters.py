"""The numpy backend's tokens: characters."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.backends.numpy import text_of
from retrain.engines import Ids
from retrain.errors import ConfigError, PromptError
from retrain.rollouts import Prompt


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

    def of(self, prompt: Prompt) -> Ids:
        """Return the token ids of a prompt, as `encode` and `read` do."""
        return self.read(prompt.ids) if prompt.ids else self.encode(text_of(prompt))

    def read(self, tokens: Ids) -> Ids:
        """Return those of a program's token ids that the policy reads.

        Raises:
            PromptError: there is none, or one is unknown.
        """
        if max(tokens) > self.end or min(tokens) == self.end:
            raise PromptError(
                f"got token {max(tokens)}; needs some of 0 to {self.end - 1}, and {self.end} after each turn"
            )
        return tuple([token for token in tokens if token != self.end])

    def completions(self, rows: Sequence[Ids]) -> list[str]:
        return ["".join(self.pieces(row)) for row in rows]

    def pieces(self, tokens: Ids) -> tuple[str, ...]:
        return tuple([self._pieces[token] for token in tokens])
