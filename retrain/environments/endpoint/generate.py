"""Tokens in, tokens out, as by vLLM's `/inference/v1/generate`: for clients that render conversations.

The run decides how to sample, and the model's end tokens end a turn, whatever the request says of them.
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from retrain.environments.endpoint.chat import Turn, usage_of


class SamplingParams(BaseModel):
    """How to sample; fields that are not here change nothing."""

    max_tokens: PositiveInt | None = None
    n: Literal[1] | None = None
    stop: list[str] | None = Field(default=None, max_length=0)


class GenerateRequest(BaseModel):
    """What a client asks for; fields that are not here change nothing."""

    token_ids: list[NonNegativeInt] = Field(min_length=1)
    sampling_params: SamplingParams = Field(default_factory=SamplingParams)
    request_id: str = ""
    stream: Literal[False] | None = None
    output_mode: Literal["tokens"] | None = None
    features: None = None  # of images and sounds
    content_parts: None = None


def tokens_of(request: GenerateRequest, turn: Turn, name: str) -> bytes:
    """Return the body of an answer."""
    pairs = zip(turn.tokens, turn.logprobs.tolist(), strict=True)
    content = [
        {"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []} for token, logprob in pairs
    ]
    choice = {
        "index": 0,
        "token_ids": turn.tokens,
        "logprobs": {"content": content},
        "finish_reason": "stop" if turn.ended else "length",
    }
    told = {"request_id": request.request_id or name, "choices": [choice], "prompt_logprobs": None}
    return json.dumps({**told, "output_mode": "tokens", "usage": usage_of(turn)}).encode()
