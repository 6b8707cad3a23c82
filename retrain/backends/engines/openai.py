"""Sampling on an OpenAI-compatible server, which reloads the adapters after every update, and scoring by it.

Uses `/v1/completions` with token ids in and out (`return_token_ids`, or vLLM's older
`return_tokens_as_token_ids`), so that text is never tokenized twice. The server must report the
log-probabilities of the distribution that it samples from (vLLM: `--logprobs-mode processed_logprobs`).
Long completions are streamed, so that a call shows how far it is and a server that stalls is noticed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import urlsplit

import numpy as np

from retrain.backends.engines import Drawn, Ids, LostAdaptersError, RefusedError
from retrain.base.errors import InfrastructureError, InterruptedRunError, RunFailedError
from retrain.base.event_loop import begun
from retrain.base.http_client import (
    LARGEST_ANSWER_BYTES,
    LONGEST_REFUSAL,
    CallError,
    Client,
    key_in,
    read_json,
    tls,
)
from retrain.base.rollouts import Floats, Ints
from retrain.control.rules.concurrency_limit import OVERLOAD, WAITED_S, CallFacts

T = TypeVar("T")

TOKENS_PER_EVENT = 32  # that vLLM may collect; one by one they take eight times the processor time to read
READ_BYTES = 1 << 16
STREAM, EVENT, LAST_EVENT = "text/event-stream", b"data:", b"[DONE]"
KEY_VARIABLE = "OPENAI_API_KEY"  # read if set; never written anywhere
ATTEMPTS = 5
FIRST_WAIT_S = 0.5  # upper bound; doubles per attempt: four seconds in total on average, for short outages
RELEASE_S = 10.0  # for the final permit and call; a worker that is stopping has 30 s
KEY_CODES = (401, 403)
NOT_FOUND = 404
COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
METRICS_WAIT_S = 5.0
ABORTED = "abort"  # reason of a completion that the server did not finish
LONGEST_WHOLE = 64  # tokens of completions that are not streamed: parts of a few tokens cost more to read


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
        done = self.finished(rows)
        return len(done) >= self.enough and done[: self.due] == list(range(self.due))

    def request(self, adapter: str, *, stream: bool) -> dict[str, Any]:
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


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that a server lists."""

    name: str
    context: int | None  # tokens; None: not told
    is_adapter: bool


@dataclass(frozen=True, slots=True, eq=False)
class ScoredPrompt:
    """What a model makes of the tokens of a prompt but the first: of (tokens - 1,), at temperature 1."""

    logprobs: Floats  # nats
    top: Ints  # (tokens - 1, k) ids of the likeliest tokens in their places, the likeliest first
    top_logprobs: Floats  # of these
    texts: Sequence[str | None]  # of the tokens by themselves; None: not told

    @classmethod
    def of(cls, ids: Ids, positions: Any, most: int) -> ScoredPrompt:
        """Read vLLM's `prompt_logprobs`: for each token, facts by the ids of itself and of the likeliest."""
        if not positions:
            raise ValueError("it has no prompt_logprobs")
        if len(positions) != len(ids):
            raise ValueError(f"it has {len(positions)} prompt_logprobs of a prompt of {len(ids)} tokens")
        after = positions[1:]
        own = [facts[str(token)] for token, facts in zip(ids[1:], after, strict=True)]
        ranked = [
            sorted(((each["logprob"], int(token)) for token, each in facts.items()), reverse=True)
            for facts in after
        ]
        most = min(most, *map(len, ranked))  # a small vocabulary has fewer
        top = np.array([row[:most] for row in ranked], dtype=np.float64)
        return cls(
            np.array([each["logprob"] for each in own], dtype=np.float64),
            top[..., 1].astype(np.int64),
            top[..., 0],
            [each.get("decoded_token") for each in own],
        )


@dataclass(slots=True, eq=False)
class StreamedCompletion:
    """A completion that a server is sampling."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""  # why it ended; empty until then

    def add(self, choice: Mapping[str, Any]) -> None:
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
        """Return a whole response: to a POST with JSON, or to a GET without a body; or a CallError."""
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
                    with self._lock:
                        if self._is_over:
                            raise OSError("ended before it was sent")
                        self._in_flight.add(connection.sock)
                    opened.callback(self._in_flight.discard, connection.sock)
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


def _parts(answer: http.client.HTTPResponse) -> Iterator[bytes]:
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


Observe: TypeAlias = Callable[[Sequence[StreamedCompletion]], None]


class Engine:
    """A client of one server. Every call holds a permit."""

    def __init__(
        self,
        url: str,
        *,
        reload: str,
        silence_s: float,
        permit: Callable[[], AbstractContextManager[object]],
        observe_call: Callable[[CallFacts], None] | None = None,
        key: str | None = None,
        named_by: str = "[backend.options].engine_url",
        advice: str = "",
    ) -> None:
        """Create the client without connecting.

        Args:
            url: address of the server.
            reload: path that loads adapters.
            silence_s: longest time without a byte from the server.
            permit: every call holds one.
            observe_call: told of calls that say something of the server's load.
            key: that the server asks for; None reads it from the environment.
            named_by: the key of a configuration that gives its address.
            advice: ends the message about a server that does not answer, in place of that key.
        """
        self._url = url.rstrip("/")
        chosen_key = key_in(KEY_VARIABLE) if key is None else key
        self._calls = ServerCalls(self._url, key=chosen_key, silence_s=silence_s)
        self._named_by = named_by
        self._unreachable = advice or f"check that the server runs and {named_by}"
        self._reload = reload
        self._unload = reload.replace("load_lora", "unload_lora")
        self._metrics = ServerCalls(self._url, key=chosen_key, silence_s=METRICS_WAIT_S)
        self._streams = reload.startswith("/v1/")  # as vLLM does; SGLang's streams may repeat token ids
        self._permit = permit
        self._observe_call = observe_call

    def load_adapter(self, name: str, directory: str) -> None:
        self._post(self._reload, {"lora_name": name, "lora_path": directory})

    def unload_adapter(self, name: str) -> None:
        with contextlib.suppress(RefusedError):  # unknown to a restarted server
            self._post(self._unload, {"lora_name": name})

    def sleep(self) -> None:
        """Make the server free its memory until it is woken up; vLLM keeps the weights in main memory."""
        self._post("/sleep?level=1", {})

    def wake_up(self) -> None:
        """Make the server ready to sample, if it sleeps."""
        self._post("/wake_up", {})

    def complete(self, adapter: str, request: CompletionRequest, observe: Observe) -> dict[int, list[Drawn]]:
        """Sample completions with these adapters in one call; return them by the number of their prompt.

        `observe` is told how far the rows are, whenever a part of the response has arrived. If some prompts
        are enough, the others are cancelled, or not asked for where the response comes as a whole.

        Raises:
            InfrastructureError: the server does not answer.
            InterruptedRunError: `end_calls` ended the call.
            RefusedError: the server refuses, or does not know the adapters.
            RunFailedError: the response does not match the request.
        """
        enough = request.enough or len(request.prompts)
        if not self._is_streamed(request):
            request = replace(request, prompts=request.prompts[:enough])
        rows = self._persist(COMPLETIONS, partial(self._sample, adapter, request, observe))
        done = request.finished(rows)
        kept = sorted(sorted(done, key=lambda number: number >= request.due)[:enough])
        if len(kept) < enough:
            counted = sum(row.is_done for row in rows)
            asked_for = f"{len(request.prompts)} prompts x {request.count}"
            raise RunFailedError(f"{self._url}: {counted} completions for {asked_for}")
        try:
            return {
                n: [row.drawn(request.end_ids) for row in rows[n * request.count : (n + 1) * request.count]]
                for n in kept
            }
        except (TypeError, ValueError) as error:
            raise self._mismatch(error) from error

    def _is_streamed(self, request: CompletionRequest) -> bool:
        return self._streams and request.max_tokens > LONGEST_WHOLE

    def models(self) -> list[ServedModel]:
        """Return the models that the server lists; errors as of `complete`."""
        answer = self._persist(MODELS, partial(self._fetch_json, MODELS))
        try:
            return [
                ServedModel(str(one["id"]), one.get("max_model_len"), bool(one.get("parent")))
                for one in answer["data"]
            ]
        except (LookupError, TypeError, AttributeError) as error:
            raise RunFailedError(
                f"{self._url}{MODELS}: the answer is no list of models ({error!r})"
            ) from error

    def score(self, model: str, prompts: Sequence[Ids], most: int = 1) -> list[ScoredPrompt]:
        """Return what a model makes of the tokens of prompts, by one call, which samples a token of each.

        Args:
            most: how many of the likeliest tokens are told in each one's place.

        Raises:
            InfrastructureError: the server does not answer.
            RefusedError: the server refuses, or does not know the model.
            RunFailedError: the answer has not the log-probabilities of every token.
        """
        body = {
            "model": model,
            "prompt": [list(ids) for ids in prompts],
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": most,
        }
        answer = self._persist(COMPLETIONS, partial(self._fetch_json, COMPLETIONS, body))
        try:
            choices = {choice["index"]: choice.get("prompt_logprobs") for choice in answer["choices"]}
            return [ScoredPrompt.of(ids, choices[number], most) for number, ids in enumerate(prompts)]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            why = str(error) if isinstance(error, ValueError) else repr(error)
            raise RunFailedError(
                f"{self._url}: the answer does not tell the log-probabilities of a prompt's tokens ({why}); "
                "the server must take `prompt_logprobs` in /v1/completions, as vLLM does"
            ) from error

    def read_metrics(self) -> str:
        """Return what the server says of its load; empty if it does not."""
        with contextlib.suppress(CallError):
            return self._metrics.fetch("/metrics").decode(errors="replace")
        return ""

    def end_calls(self) -> None:
        self._calls.end_calls()

    def _sample(self, adapter: str, request: CompletionRequest, observe: Observe) -> list[StreamedCompletion]:
        """Make one attempt; rows that are not told of stay unfinished."""
        body = request.request(adapter, stream=self._is_streamed(request))
        rows = [StreamedCompletion() for _ in range(len(request.prompts) * request.count)]
        with contextlib.closing(
            self._calls.events(COMPLETIONS, body, can_be_ended=request.can_be_ended)
        ) as events:
            for text in events:
                has_ended = self._add(rows, read_json(text, self._calls.masked))
                observe(rows)
                if has_ended and request.enough and request.suffices(rows):
                    break  # the connection is closed, and the server drops the others
        return rows

    def _add(self, rows: Sequence[StreamedCompletion], event: Any) -> bool:
        """Append what a response, or a part of one, says of rows; return whether one has ended."""
        try:
            if isinstance(problem := event.get("error"), dict):  # in the middle of a stream
                code = str(problem.get("code"))  # of HTTP, or a word such as "overloaded"
                raise self._calls.refusal(json.dumps(problem).encode(), int(code) if code.isdecimal() else 0)
            for choice in event["choices"]:
                rows[choice["index"]].add(choice)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._mismatch(error) from error
        reasons = {choice.get("finish_reason") for choice in event["choices"]}
        if ABORTED in reasons:
            raise CallError("the server gave up a completion")
        return reasons != {None}

    def _mismatch(self, error: Exception) -> RunFailedError:
        return RunFailedError(
            f"{self._url}: the answer lacks token ids or log-probabilities ({error!r}); the server must "
            "support 'return_token_ids', as recent versions of vLLM and SGLang do"
        )

    def close(self, adapters: Sequence[str]) -> None:
        """Unload these adapters from the server if a permit is free soon; safe to call twice."""

        def release() -> None:
            for adapter in adapters:
                unload = partial(self._calls.fetch, self._unload, {"lora_name": adapter})
                with contextlib.suppress(CallError):
                    self._under_permit(self._unload, unload)

        if adapters:
            # in a daemon thread, so that neither permit nor server can delay the exit
            wait([begun(release)], RELEASE_S)
        self._calls.stop()

    def _fetch_json(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return read_json(self._calls.fetch(path, body), self._calls.masked)

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        self._persist(path, partial(self._calls.fetch, path, body))

    def _persist(self, path: str, attempt: Callable[[], T]) -> T:
        try:
            return self._calls.persist(
                partial(self._under_permit, path, attempt), attempts=ATTEMPTS, first_wait_s=FIRST_WAIT_S
            )
        except CallError as error:
            problem = f"{self._url}{path}: {error.code or ''} {error}".replace(":  ", ": ")
            if error.is_passing:
                raise InfrastructureError(f"{problem}; {self._unreachable}") from error
            lost = error.code == NOT_FOUND and path == COMPLETIONS
            kind = LostAdaptersError if lost else RefusedError
            raise kind(f"{problem}; {self._advice(path, error.code)}") from error

    def _advice(self, path: str, code: int) -> str:
        if code in KEY_CODES:
            return f"set {KEY_VARIABLE} in the environment to the key that the server was started with"
        if path == self._reload:
            return (
                "the server must load adapters while it runs (vLLM: --enable-lora, --max-lora-rank and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; SGLang: --enable-lora, and [backend.options] "
                'engine_reload = "/load_lora_adapter") and see engine_adapters'
            )
        return f"check {self._named_by} and how the server was started"

    def _under_permit(self, path: str, attempt: Callable[[], T]) -> T:
        """Make one call and report its outcome, except connection failures, which say nothing about load."""
        began_s, worked, overloaded = time.monotonic(), False, False
        with self._permit():
            started_s = time.monotonic()
            try:
                result = attempt()
                worked = True
                return result
            except CallError as error:
                overloaded = error.is_timeout or error.code in OVERLOAD
                raise
            finally:
                if self._observe_call is not None and (worked or overloaded):
                    latency_s, waited = time.monotonic() - started_s, started_s - began_s > WAITED_S
                    self._observe_call(CallFacts(path, latency_s, overloaded, waited))
