"""Completions as a server is asked for them, and as its response, or the parts of one, tell of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retrain.engines import Drawn, Ids

TOKENS_PER_EVENT = 32  # that vLLM may collect; one by one they take eight times the processor time to read


@dataclass(frozen=True, slots=True)
class Wanted:
    """Completions to sample in one call."""

    prompts: Sequence[Ids]
    count: int  # of each prompt
    max_tokens: int
    temperature: float
    end_ids: Ids
    stop: Sequence[str]
    cut: Mapping[str, float]  # top_p, top_k and min_p, as far as they are set
    can_be_ended: bool = False  # by `end_calls`
    enough: int = 0  # prompts whose completions suffice; 0: all
    due: int = 0  # so many of the first prompts must be among them

    def finished(self, rows: Sequence[StreamedCompletion]) -> list[int]:
        """Return the prompts all of whose completions are done."""
        groups = range(len(self.prompts))
        return [n for n in groups if all(row.is_done for row in rows[n * self.count : (n + 1) * self.count])]

    def suffices(self, rows: Sequence[StreamedCompletion]) -> bool:
        """Whether no further completion is needed."""
        done = self.finished(rows)
        return len(done) >= self.enough and done[: self.due] == list(range(self.due))

    def request(self, adapter: str, *, stream: bool) -> dict[str, Any]:
        """Return the body of the request."""
        return {
            "model": adapter,
            "lora_path": adapter,  # SGLang does not look up adapters by model name
            "prompt": [list(ids) for ids in self.prompts],
            "n": self.count,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            **self.cut,
            "stop": list(self.stop),
            "stop_token_ids": list(self.end_ids),
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
            **({"stream": True, "stream_interval": TOKENS_PER_EVENT} if stream else {}),
        }


@dataclass(slots=True, eq=False)
class StreamedCompletion:
    """A completion that a server is sampling."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""  # why it ended; empty until then

    def add(self, choice: Mapping[str, Any]) -> None:
        """Append what a response says of it."""
        if (shown := choice.get("logprobs")) is not None:
            named = choice.get("token_ids") or [n.removeprefix("token_id:") for n in shown["tokens"]]
            self.tokens += map(int, named)
            self.logprobs += shown["token_logprobs"]
        self.finish = choice.get("finish_reason") or self.finish

    @property
    def is_done(self) -> bool:
        return bool(self.finish)

    def drawn(self, end_ids: Ids) -> Drawn:
        logprobs = np.array(self.logprobs, dtype=np.float64)
        if len(self.tokens) != len(logprobs) or not self.tokens or not np.isfinite(logprobs).all():
            raise ValueError(
                f"{len(self.tokens)} tokens with {len(logprobs)} log-probabilities, not all finite"
            )
        ended = self.finish == "stop" or self.tokens[-1] in end_ids
        return Drawn(tuple(self.tokens), logprobs, float("nan"), ended)
