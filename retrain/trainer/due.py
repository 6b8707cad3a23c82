"""Which evaluations are due, and what one may cost that was not made before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrain.config.prices import Price
from retrain.config.schema import Config, Environment
from retrain.records.spending import Tokens
from retrain.rollouts import Prompt


@dataclass(frozen=True)
class Due:
    """An evaluation that is due."""

    name: str  # of its `[[eval]]`; "" for the run's own
    prompts: Sequence[Prompt]
    samples: int  # completions per prompt
    max_tokens: int
    played: Environment
    trained: Config

    @property
    def size(self) -> str:
        """What it asks for, in words: another size costs something else."""
        turns = "" if self.played.is_single_turn else f", {self.played.max_turns} turns"
        read = sum(map(_tokens_at_most, self.prompts))
        return (
            f"{len(self.prompts)} prompts of {read} bytes x {self.samples} x {self.max_tokens} tokens{turns}"
        )

    def at_most_usd(self, price: Price, rollout_usd: float) -> float:
        """Return what it costs if no completion is dearer than a rollout that a step also trained on.

        Where it allows more tokens or turns than a step, each completion may be as much dearer. Before the
        first step, with `rollout_usd` 0, each is as long as it may be; what further turns read is not known.
        """
        table, own = self.trained.training, self.trained.environment
        each_usd = rollout_usd * max(1.0, self.max_tokens / table.max_tokens)
        longest_usd = Tokens(sample=self.max_tokens).usd(price)
        if not rollout_usd:
            each_usd = longest_usd * (1 if self.played.is_single_turn else self.played.max_turns)
        elif self.played.is_single_turn:
            each_usd = min(each_usd, longest_usd)
        elif self.played != own:
            each_usd *= self.played.max_turns
        system = len(str(self.trained.backend.options.get("system_prompt", "")).encode())
        read = Tokens(prefill=sum(_tokens_at_most(one) + system for one in self.prompts)).usd(price)
        return self.samples * (read + len(self.prompts) * each_usd)


def _tokens_at_most(prompt: Prompt) -> int:
    """Return a token for each byte of a prompt."""
    texts = [content for _, content in prompt.messages] or [prompt.text]
    return len(prompt.ids) or sum(len(text.encode()) for text in (*texts, prompt.tools))
