"""Calls of a sampling server: the completions that one asks for, and its end from any thread.

An end frees the server's place at once. By http.client, not httpx: the socket can be reached before the
server answers, and a streamed part costs half the time. Each call has a connection of its own to the server
itself: no proxy, and no redirection.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from retrain.backends.engines import Drawn, Ids
from retrain.base.errors import InterruptedRunError
from retrain.base.http_client import LARGEST_ANSWER_BYTES, LONGEST_REFUSAL, CallError, Client, tls

TOKENS_PER_EVENT = 32  # that vLLM may collect; one by one they take eight times the processor time to read
READ_BYTES = 1 << 16
STREAM, EVENT, LAST_EVENT = "text/event-stream", b"data:", b"[DONE]"


@dataclass(frozen=True, slots=True)
class CompletionRequest:
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


class ServerCalls(Client):
    """A client whose calls may be silent for a limited time, but take as long as they need."""

    def __init__(self, url: str, *, key: str, silence_s: float) -> None:
        """Prepare; nothing is connected yet.

        Args:
            url: address that paths are appended to.
            key: sent as a bearer token; empty sends none.
            silence_s: longest time without a byte from the server.
        """
        super().__init__(url, key)
        self._silence_s = silence_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._in_flight: set[socket.socket] = set()  # of calls that can be ended
        self._lock = threading.Lock()
        self._is_over = False

    def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """Return a whole response: to a POST with JSON, or to a GET without a body.

        Raises:
            CallError: refused, silent for too long, or the connection failed.
        """
        with self._answer(path, body, can_be_ended=False) as answer:
            return b"".join(_parts(answer))

    def events(self, path: str, body: Mapping[str, Any], *, can_be_ended: bool) -> Generator[bytes]:
        """Iterate over the JSON texts of a response: a stream's events, or one if the server sends no stream.

        A generator that is closed early closes the connection.

        Raises:
            CallError: as `fetch`; or the stream breaks off.
            InterruptedRunError: `end_calls` ended it.
        """
        with self._answer(path, body, can_be_ended=can_be_ended) as answer:
            if answer.headers.get_content_type() != STREAM:
                yield b"".join(_parts(answer))
                return
            for line in _lines(answer):
                text = line.removeprefix(EVENT).strip()
                if text == LAST_EVENT:
                    return
                if text and line.startswith(EVENT):
                    yield text
            raise CallError("the response ended early")

    def end_calls(self) -> None:
        """End the calls in flight that can be ended, and all such calls from now on."""
        with self._lock:
            self._is_over = True
            for connection in list(self._in_flight):
                with suppress(OSError):  # it is closed already
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)  # below TLS, which would say goodbye

    @contextmanager
    def _answer(
        self, path: str, body: Mapping[str, Any] | None, *, can_be_ended: bool
    ) -> Iterator[http.client.HTTPResponse]:
        """Return a response whose body is not read yet; errors in reading it become CallErrors."""
        address, headers, text = urlsplit(self._url), self._headers, None
        if body is not None:
            headers, text = headers | {"Content-Type": "application/json"}, json.dumps(body)
        with ExitStack() as opened:
            try:
                host, port = address.hostname or "", address.port
                connection = (
                    http.client.HTTPSConnection(host, port, timeout=self._silence_s, context=tls())
                    if address.scheme == "https"
                    else http.client.HTTPConnection(host, port, timeout=self._silence_s)
                )
                opened.enter_context(closing(connection))
                connection.connect()
                if can_be_ended:
                    opened.callback(self._in_flight.discard, self._begun(connection.sock))
                method = "GET" if text is None else "POST"
                connection.request(method, address.path + path, text, headers)
                # closed as well: it holds the socket if the server closes it after the response
                answer = opened.enter_context(closing(connection.getresponse()))
                if not http.client.OK <= answer.status < http.client.MULTIPLE_CHOICES:
                    refusal = answer.read(LONGEST_REFUSAL)
                    raise self.refusal(refusal, answer.status, answer.headers.get("Retry-After", ""))
                yield answer
            except (http.client.HTTPException, OSError, ValueError) as error:
                if can_be_ended and self._is_over:
                    raise InterruptedRunError("sampling was cancelled") from error
                if isinstance(error, TimeoutError):
                    raise CallError(f"no data for {self._silence_s:g} s", is_timeout=True) from error
                raise CallError(self.masked(str(error) or type(error).__name__)) from error

    def _begun(self, own: socket.socket) -> socket.socket:
        """Return the socket of a call, which `end_calls` finds from now on."""
        with self._lock:
            if self._is_over:
                raise OSError("ended before it was sent")
            self._in_flight.add(own)
        return own


def _parts(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """Iterate over the parts of a body as they arrive."""
    total = 0
    while part := answer.read1(READ_BYTES):
        total += len(part)
        if total > LARGEST_ANSWER_BYTES:
            raise CallError(f"the answer is longer than {LARGEST_ANSWER_BYTES} bytes")
        yield part


def _lines(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    left = b""
    for part in _parts(answer):
        *lines, left = (left + part).split(b"\n")
        yield from lines
