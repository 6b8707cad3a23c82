"""Guess a number; each digit is answered with `<`, `=` or `>`: the secret's is lower, equal or higher.

The right number is worth 1. Any other is worth 0.1, and 0.4 times the share of its right digits. A guess of
another form ends the episode with reward 0.
"""

from __future__ import annotations

from retrain.base.rollouts import Prompt
from retrain.plugins.environments import Episode

IN_FORM, PER_SHARE = 0.1, 0.4


def open_episode() -> Game:
    """Return a game, whose secret is the prompt's answer."""
    return Game()


class Game(Episode):
    """One number to guess."""

    def start(self, prompt: Prompt) -> str:
        self._secret = prompt.answer
        return prompt.text

    def step(self, completion: str) -> tuple[str, float, bool]:
        secret = self._secret
        if len(completion) != len(secret) or not completion.isdecimal():
            return "", 0.0, True
        pairs = zip(secret, completion, strict=True)
        signs = "".join("=" if digit == guess else "<" if digit < guess else ">" for digit, guess in pairs)
        if completion == secret:
            return signs, 1.0, True
        return signs, IN_FORM + PER_SHARE * signs.count("=") / len(secret), False
