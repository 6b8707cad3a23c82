"""One completion per prompt, scored by `[reward]`."""

from __future__ import annotations

from retrain.base.rollouts import Messages, Prompt
from retrain.plugins.environments import Episode


def open_episode() -> Question:
    """Return an episode of one turn."""
    return Question()


class Question(Episode):
    """A prompt to answer."""

    def start(self, prompt: Prompt) -> str | list[dict[str, str]]:
        return spoken(prompt.messages) or prompt.text

    def step(self, completion: str) -> tuple[str, None, bool]:
        return "", None, True


def spoken(messages: Messages) -> list[dict[str, str]]:
    """Return messages as environments write them."""
    return [{"role": role, "content": content} for role, content in messages]
