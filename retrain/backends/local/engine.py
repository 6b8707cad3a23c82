"""Sampling by an OpenAI-compatible server, which is handed the adapters after every update.

Speaks `/v1/completions` with token ids in and out (`return_token_ids`, or vLLM's older
`return_tokens_as_token_ids`): text is never tokenized twice. The server must report the
log-probabilities of the distribution that it draws from (vLLM: `--logprobs-mode processed_logprobs`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.backends.local.options import LocalOptions
from retrain.backends.local.sampling import Drawn
from retrain.controllers.permits import OVERLOAD, WAITED_S, CallFacts
from retrain.errors import ConfigError, InfrastructureError, RunFailedError

KEY_VARIABLE = "OPENAI_API_KEY"  # read when there is one; never written anywhere
ATTEMPTS = 5
FIRST_WAIT_S = 0.25  # doubled at each further attempt: four seconds in all, a server's hiccup
PASSING = (408, 425, 429, 500, 502, 503, 504)
RELEASE_S = 10.0  # for a permit and the call on leaving; a worker that was asked to leave has 30 s
EXCERPT = 500  # bytes of a refusal that are shown
MISSING, KEY = 404, (401, 403)
COMPLETIONS = "/v1/completions"

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What one call samples: `count` completions of each prompt."""

    prompts: Sequence[Ids]
    count: int
    max_tokens: int
    temperature: float
    end_ids: Ids
    stop: tuple[str, ...]
    seed: int


class RefusedError(ConfigError):
    """The server does not do what it is asked to, and would not if it were asked again."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: it would take the key along, and ask without the prompts."""

    def redirect_request(self, *_: object) -> None:
        """Leave the answer what it is: a refusal."""


OPENER = urllib.request.build_opener(_StayHere)


class Engine:
    """A client of one server. Every call holds a permit."""

    def __init__(
        self,
        options: LocalOptions,
        permit: Callable[[], AbstractContextManager[object]],
        observe_call: Callable[[CallFacts], None] | None = None,
    ) -> None:
        self._url = options.engine_url.rstrip("/")
        self._reload = options.engine_reload
        self._unload = options.engine_reload.replace("load_lora", "unload_lora")
        self._timeout_s = options.engine_timeout_s
        self._adapter = ""
        self._permit = permit
        self._observe_call = observe_call

    def use_adapter(self, name: str, directory: str) -> None:
        """Have the server load adapters and sample with them from now on, then forget the last ones.

        Raises:
            InfrastructureError: the server does not answer.
            RefusedError: it refuses.
        """
        self._post(self._reload, {"lora_name": name, "lora_path": directory})
        if self._adapter:
            with contextlib.suppress(RefusedError):  # a server that was begun anew knows nothing of them
                self._post(self._unload, {"lora_name": self._adapter})
        self._adapter = name

    def release(self) -> None:
        """Have the server forget the adapters, if it is still there and a permit comes soon."""
        adapter, self._adapter = self._adapter, ""
        if adapter:
            leaving = threading.Thread(target=self._forget, args=(adapter,), name="engine", daemon=True)
            leaving.start()
            leaving.join(RELEASE_S)

    def _forget(self, adapter: str) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._under_permit(self._unload, {"lora_name": adapter})

    def complete(self, request: Request) -> list[Drawn]:
        """Sample `count` completions of every prompt in one call, prompt after prompt.

        Raises:
            InfrastructureError: the server does not answer.
            RefusedError: it refuses; with code 404 if it does not know the adapters.
            RunFailedError: its answer is not what was asked for.
        """
        answer = self._post(
            COMPLETIONS,
            {
                "model": self._adapter,
                "lora_path": self._adapter,  # SGLang does not look for adapters among models
                "prompt": [list(ids) for ids in request.prompts],
                "n": request.count,
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "top_p": 1.0,
                "seed": request.seed,
                "stop": list(request.stop),
                "stop_token_ids": list(request.end_ids),
                "logprobs": 1,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
                "skip_special_tokens": False,
            },
        )
        try:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            drawn = [_drawn(choice, request.end_ids) for choice in choices]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RunFailedError(
                f"{self._url}: an answer without token ids and log-probabilities ({error!r}); it must "
                "support 'return_token_ids', as later versions of vLLM and SGLang do"
            ) from error
        if len(drawn) != len(request.prompts) * request.count:
            raise RunFailedError(
                f"{self._url}: {len(drawn)} completions for {len(request.prompts)} prompts x {request.count}"
            )
        return drawn

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        wait_s = FIRST_WAIT_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._under_permit(path, body)
            except urllib.error.HTTPError as error:
                problem = f"{error.code} {_said(error)}"
                if error.code not in PASSING:
                    raise RefusedError(
                        f"{self._url}{path}: {problem}; {self._advice(path, error.code)}", error.code
                    ) from error
            except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
                problem = str(error) or type(error).__name__
            if attempt < ATTEMPTS:
                time.sleep(wait_s)
                wait_s *= 2
        raise InfrastructureError(
            f"{self._url}{path}: {problem}; check that the server runs and [backend.options].engine_url"
        )

    def _advice(self, path: str, code: int) -> str:
        if code in KEY:
            return f"set {KEY_VARIABLE} in the environment to the key that the server was started with"
        if path == self._reload:
            return (
                "the server must load adapters while it runs (vLLM: --enable-lora, --max-lora-rank and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; SGLang: --enable-lora, and [backend.options] "
                'engine_reload = "/load_lora_adapter") and see engine_adapters'
            )
        return "check [backend.options].engine_url and how the server was started"

    def _under_permit(self, path: str, body: dict[str, Any]) -> Any:
        asked, worked, overloaded = time.monotonic(), False, False
        with self._permit():
            started = time.monotonic()
            try:
                answer = self._call(path, body)
                worked = True
                return answer
            except (urllib.error.HTTPError, TimeoutError) as error:
                overloaded = isinstance(error, TimeoutError) or error.code in OVERLOAD
                raise
            finally:
                if self._observe_call is not None and (worked or overloaded):
                    latency_s, waited = time.monotonic() - started, started - asked > WAITED_S
                    self._observe_call(CallFacts(path, latency_s, overloaded, waited))

    def _call(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers, method="POST")
        deadline, parts = time.monotonic() + self._timeout_s, []
        with OPENER.open(request, timeout=self._timeout_s) as answer:
            while part := answer.read1(1 << 20):
                parts.append(part)
                if time.monotonic() > deadline:  # the socket's own limit is for each read
                    raise TimeoutError(f"the answer was not whole within {self._timeout_s:g} s")
        content = b"".join(parts)
        # adapters' endpoints answer in plain words
        return json.loads(content) if path == COMPLETIONS else content


def _said(refusal: urllib.error.HTTPError) -> str:
    """Return the beginning of a refusal's text, as far as it came; some servers repeat the key in it."""
    with refusal, contextlib.suppress(OSError, http.client.HTTPException):
        said = refusal.read(EXCERPT).decode(errors="replace")
        key = os.environ.get(KEY_VARIABLE)
        return said.replace(key, "***") if key else said
    return ""


def _drawn(choice: dict[str, Any], end_ids: Ids) -> Drawn:
    named = choice.get("token_ids") or [n.removeprefix("token_id:") for n in choice["logprobs"]["tokens"]]
    tokens = tuple(int(token) for token in named)
    logprobs = np.array(choice["logprobs"]["token_logprobs"], dtype=np.float64)
    if len(tokens) != len(logprobs) or not tokens or not np.isfinite(logprobs).all():
        raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities, not all finite")
    ended = choice["finish_reason"] == "stop" or tokens[-1] in end_ids
    return Drawn(tokens, logprobs, float("nan"), ended)
