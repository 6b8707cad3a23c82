"""Chat completions in OpenAI's form, and tokens in, tokens out, for clients that render conversations.

The latter are as by vLLM's `/inference/v1/generate`; the model's end tokens end a turn, whatever is asked.

Refused is what would make a turn something else than a sample of the policy as the run samples it: several
choices, stop strings, other formats, calls that must be made. The run decides the temperature.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from retrain.base.rollouts import Floats

R = TypeVar("R", bound=BaseModel)
END_OF_STREAM = b"data: [DONE]\n\n"
ROLES = {"developer": "system"}  # as OpenAI calls it now


class Refusal(Exception):  # noqa: N818 - an answer, no failure of ours
    """An error that a client is answered with."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self._told = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def body(self) -> dict[str, Any]:
        return {"error": self._told}


class MessagePart(BaseModel):
    """A part of a message."""

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """What the policy called."""

    name: str
    arguments: str  # JSON

    @property
    def key(self) -> str:
        """The same text for the same call, however a client writes its JSON."""
        try:
            return json.dumps([self.name, json.loads(self.arguments)], sort_keys=True)
        except (ValueError, RecursionError):
            return self.arguments


class Called(BaseModel):
    """A call of a function, which the policy wrote."""

    id: str
    function: CalledFunction

    @property
    def key(self) -> str:
        return f"{self.id} {self.function.key}"


class Message(BaseModel):
    """A message of the conversation so far."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[MessagePart] | None = None
    tool_calls: list[Called] | None = None

    def plain(self) -> tuple[str, str]:
        """Return role and content as the chat template gets them."""
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return ROLES.get(self.role, self.role), content


class StreamOptions(BaseModel):
    """What a stream tells besides the completion."""

    include_usage: bool = False


class TextFormat(BaseModel):
    """The only format that a policy samples in."""

    type: Literal["text"]


class Function(BaseModel):
    """A function that the policy may call."""

    model_config = ConfigDict(extra="allow")
    name: str


class OfferedTool(BaseModel):
    """A function in the form of a request."""

    type: Literal["function"]
    function: Function


class ChatRequest(BaseModel):
    """What a client asks for; fields that are not here change nothing."""

    messages: list[Message] = Field(min_length=1)
    model: str = "policy"
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: bool | None = False
    return_token_ids: bool | None = False
    n: Literal[1] | None = None
    top_logprobs: Literal[0] | None = None
    stop: list[str] | None = Field(default=None, max_length=0)
    response_format: TextFormat | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: Literal["auto"] | None = None

    @property
    def schemas(self) -> str:
        """The functions as JSON, "" without any."""
        return json.dumps([tool.model_dump() for tool in self.tools]) if self.tools else ""

    @property
    def limit(self) -> int | None:
        """The most tokens of the turn, if the client says it."""
        return self.max_completion_tokens or self.max_tokens


def read_request(kind: type[R], body: bytes) -> R:
    """Return a request; a Refusal names the parameter that is wrong."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        # of a union, the nearest
        first = max(error.errors(include_url=False), key=lambda one: len(one["loc"]))
        where = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
        got = "" if first["type"] in ("missing", "json_invalid") else f"; got {first['input']!r:.60}"
        raise Refusal(f"{where}: {first['msg']}{got}".lstrip(": "), param=where or None) from error


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A turn of the policy."""

    tokens: tuple[int, ...]
    logprobs: Floats
    pieces: tuple[str, ...]
    ended: bool
    read: tuple[int, ...] | None  # token ids before it; None: the backend does not tell
    content: str  # the text without calls
    calls: tuple[Mapping[str, Any], ...] = ()  # of functions, in OpenAI's form

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a message; whoever repeats it continues the conversation."""
        if not self.calls:
            return {"role": "assistant", "content": self.content}
        return {"role": "assistant", "content": self.content or None, "tool_calls": list(self.calls)}


def answer_to(request: ChatRequest, turn: Turn, name: str) -> bytes:
    """Return the body of an answer, which is one JSON object or the events of a stream."""
    if request.stream:
        return b"".join(_events(request, turn, name))
    choice = {"message": turn.message, **_details(request, turn)}
    body = _frame(request, name, "chat.completion", choice)
    if request.return_token_ids:
        body["prompt_token_ids"] = turn.read
    return json.dumps({**body, "usage": usage_of(turn)}).encode()


def _events(request: ChatRequest, turn: Turn, name: str) -> Iterator[bytes]:
    """Iterate over the events of a stream; the turn comes in one, because turns are sampled in batches."""
    details = _details(request, turn)
    end = details.pop("finish_reason")
    delta = turn.message
    if turn.calls:
        delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(turn.calls)]
    deltas: list[Mapping[str, Any]] = [
        {"delta": delta, "finish_reason": None, **details},
        {"delta": {}, "finish_reason": end},
    ]
    chunks = [_frame(request, name, "chat.completion.chunk", one) for one in deltas]
    if request.return_token_ids:
        chunks[0]["prompt_token_ids"] = turn.read
    if request.stream_options and request.stream_options.include_usage:
        chunks.append({**chunks[-1], "choices": [], "usage": usage_of(turn)})
    for event in chunks:
        yield b"data: " + json.dumps(event).encode() + b"\n\n"
    yield END_OF_STREAM


def _frame(request: ChatRequest, name: str, kind: str, choice: Mapping[str, Any]) -> dict[str, Any]:
    body = {"id": name, "object": kind, "created": int(time.time()), "model": request.model}
    return {**body, "choices": [{"index": 0, **choice}]}


def _details(request: ChatRequest, turn: Turn) -> dict[str, Any]:
    end = "tool_calls" if turn.calls else "stop" if turn.ended else "length"
    details: dict[str, Any] = {"finish_reason": end, "logprobs": None}
    if request.logprobs:
        content = [
            {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
            for piece, logprob in zip(turn.pieces, turn.logprobs.tolist(), strict=True)
        ]
        details["logprobs"] = {"content": content}
    if request.return_token_ids:
        details["token_ids"] = turn.tokens
    return details


def usage_of(turn: Turn) -> dict[str, int]:
    """Return how many tokens a turn took."""
    before, sampled = len(turn.read or ()), len(turn.tokens)
    return {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}


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
    body = {"request_id": request.request_id or name, "choices": [choice], "prompt_logprobs": None}
    return json.dumps({**body, "output_mode": "tokens", "usage": usage_of(turn)}).encode()
