"""Sampling on an OpenAI-compatible server, which reloads the adapters after every update.

Uses `/v1/completions` with token ids in and out (`return_token_ids`, or vLLM's older
`return_tokens_as_token_ids`), so that text is never tokenized twice. The server must report the
log-probabilities of the distribution that it samples from (vLLM: `--logprobs-mode processed_logprobs`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from retrain.controllers.permits import OVERLOAD, WAITED_S, CallFacts
from retrain.engines import Drawn, Ids, LostAdaptersError, RefusedError
from retrain.errors import ConfigError, InfrastructureError, RunFailedError
from retrain.http_client import HEADER_VALUE, CallError, HttpClient, read_json

KEY_VARIABLE = "OPENAI_API_KEY"  # read if set; never written anywhere
ATTEMPTS = 5
FIRST_WAIT_S = 0.5  # upper bound; doubles per attempt: four seconds in total on average, for short outages
RELEASE_S = 10.0  # for the final permit and call; a worker that is stopping has 30 s
KEY_CODES = (401, 403)
NOT_FOUND = 404
COMPLETIONS = "/v1/completions"


class Engine:
    """A client of one server. Every call holds a permit."""

    def __init__(
        self,
        url: str,
        *,
        reload: str,
        timeout_s: float,
        permit: Callable[[], AbstractContextManager[object]],
        observe_call: Callable[[CallFacts], None] | None = None,
        key: str | None = None,
        advice: str = "check that the server runs and [backend.options].engine_url",
    ) -> None:
        """Create the client without connecting.

        Args:
            url: address of the server.
            reload: path that loads adapters.
            timeout_s: limit of a call.
            permit: every call holds one.
            observe_call: told of calls that say something of the server's load.
            key: that the server asks for; None reads it from the environment.
            advice: ends the message about a server that does not answer.
        """
        self._url = url.rstrip("/")
        own = _key() if key is None else key
        self._client = HttpClient(self._url, key=own, timeout_s=timeout_s, extra="local", who="local")
        self._unreachable = advice
        self._reload = reload
        self._unload = reload.replace("load_lora", "unload_lora")
        self._loaded: list[str] = []  # names of adapters
        self._permit = permit
        self._observe_call = observe_call

    def load_adapter(self, name: str, directory: str) -> None:
        """Make the server load adapters."""
        self._post(self._reload, {"lora_name": name, "lora_path": directory})
        self._loaded.append(name)

    def unload_adapter(self, name: str) -> None:
        """Make the server forget adapters."""
        self._loaded.remove(name)
        with contextlib.suppress(RefusedError):  # unknown to a restarted server
            self._post(self._unload, {"lora_name": name})

    def complete(
        self,
        adapter: str,
        prompts: Sequence[Ids],
        count: int,
        *,
        max_tokens: int,
        temperature: float,
        end_ids: Ids,
        stop: Sequence[str],
        cut: Mapping[str, float],
        seed: int,
    ) -> list[Drawn]:
        """Sample `count` completions of every prompt in one call with these adapters, prompt after prompt.

        Raises:
            InfrastructureError: the server does not answer.
            RefusedError: the server refuses, or does not know the adapters.
            RunFailedError: the response does not match the request.
        """
        request = {
            "model": adapter,
            "lora_path": adapter,  # SGLang does not look up adapters by model name
            "prompt": [list(ids) for ids in prompts],
            "n": count,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            **cut,  # top_p, top_k and min_p, as far as they are set
            "seed": seed,
            "stop": list(stop),
            "stop_token_ids": list(end_ids),
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }
        answer = self._post(COMPLETIONS, request)
        try:
            choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
            drawn = [_drawn(choice, end_ids) for choice in choices]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RunFailedError(
                f"{self._url}: the answer lacks token ids or log-probabilities ({error!r}); the server must "
                "support 'return_token_ids', as recent versions of vLLM and SGLang do"
            ) from error
        if len(drawn) != len(prompts) * count:
            raise RunFailedError(
                f"{self._url}: {len(drawn)} completions for {len(prompts)} prompts x {count}"
            )
        return drawn

    def close(self) -> None:
        """Unload the adapters from the server if a permit is free soon; safe to call twice."""
        loaded, self._loaded = self._loaded, []
        if loaded:
            # a daemon thread, so that neither permit nor server can delay the exit
            leaving = threading.Thread(target=self._release, args=(loaded,), name="engine", daemon=True)
            leaving.start()
            leaving.join(RELEASE_S)
        self._client.close()

    def _release(self, adapters: Sequence[str]) -> None:
        for adapter in adapters:
            with contextlib.suppress(CallError):
                self._under_permit(self._unload, {"lora_name": adapter})

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            return self._client.persist(
                partial(self._under_permit, path, body), attempts=ATTEMPTS, first_wait_s=FIRST_WAIT_S
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
        return "check [backend.options].engine_url and how the server was started"

    def _under_permit(self, path: str, body: Mapping[str, Any]) -> Any:
        """Make one call and report its outcome, except connection failures, which say nothing about load."""
        asked, worked, overloaded = time.monotonic(), False, False
        with self._permit():
            started = time.monotonic()
            try:
                answer = self._client.post(path, body)
                # the adapter endpoints answer in plain text
                result = read_json(answer, self._client.masked) if path == COMPLETIONS else answer
                worked = True
                return result
            except CallError as error:
                overloaded = error.is_timeout or error.code in OVERLOAD
                raise
            finally:
                if self._observe_call is not None and (worked or overloaded):
                    latency_s, waited = time.monotonic() - started, started - asked > WAITED_S
                    self._observe_call(CallFacts(path, latency_s, overloaded, waited))


def _key() -> str:
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if key and not HEADER_VALUE.fullmatch(key):
        raise ConfigError(
            f"the environment variable {KEY_VARIABLE} is not a valid key: it contains blanks, line breaks or "
            "characters beyond ASCII"
        )
    return key


def _drawn(choice: dict[str, Any], end_ids: Ids) -> Drawn:
    named = choice.get("token_ids") or [n.removeprefix("token_id:") for n in choice["logprobs"]["tokens"]]
    tokens = tuple(int(token) for token in named)
    logprobs = np.array(choice["logprobs"]["token_logprobs"], dtype=np.float64)
    if len(tokens) != len(logprobs) or not tokens or not np.isfinite(logprobs).all():
        raise ValueError(f"{len(tokens)} tokens with {len(logprobs)} log-probabilities, not all finite")
    ended = choice["finish_reason"] == "stop" or tokens[-1] in end_ids
    return Drawn(tokens, logprobs, float("nan"), ended)
