"""One question to an OpenAI-compatible chat endpoint, asked again where that may help."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from retrain.errors import RunFailedError
from retrain.rewards import UnscoredError

WORTH_RETRYING = {408, 409, 425, 429, 500, 502, 503, 504, 529}
LONGEST_WAIT_S = 30.0
LARGEST_REPLY_BYTES = 4 << 20
EXCERPT = 300  # characters of a refusal that are shown
JITTER = random.Random()  # its own: waiting must not disturb anybody's seeded numbers


class _StayHere(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: it would take the key along, and ask without the question."""

    def redirect_request(self, *_: object) -> None:
        """Leave the answer what it is: a refusal."""


OPENER = urllib.request.build_opener(_StayHere)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to ask, and how patiently."""

    base_url: str  # up to and without /chat/completions
    key: str
    timeout_s: float
    retries: int
    backoff_s: float
    given_up: threading.Event = field(default_factory=threading.Event)  # set: ask nothing more

    def ask(self, body: Mapping[str, Any]) -> str:
        """Return the text of the first choice.

        Raises:
            TimeoutError: no answer in time, however often it was asked.
            UnscoredError: unreachable or overloaded, however often it was asked, or no text came back.
            RunFailedError: the endpoint refuses (key, model, request): asking again would not help.
        """
        for attempt in range(self.retries + 1):
            try:
                return _content(self._post(body))
            except urllib.error.HTTPError as error:
                said = self._said(error)
                if error.code not in WORTH_RETRYING:
                    raise RunFailedError(
                        f"the judge at {self.base_url} refused with HTTP {error.code}: {said}; "
                        "check the address, the model's name and the key"
                    ) from error
                failure: Exception = UnscoredError(f"HTTP {error.code} from {self.base_url}: {said}")
                wait_s = self._wait_s(attempt, error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException) as error:
                failure, wait_s = self._explained(error), self._wait_s(attempt, None)
            if attempt == self.retries or self.given_up.wait(wait_s):
                break
        raise failure

    def _post(self, body: Mapping[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(
            f"{self.base_url}/chat/completions", json.dumps(body).encode(), headers, method="POST"
        )
        deadline = time.monotonic() + self.timeout_s
        parts: list[bytes] = []
        with OPENER.open(request, timeout=self.timeout_s) as response:
            while part := response.read1(1 << 16):
                parts.append(part)
                if time.monotonic() > deadline:  # the socket's own limit is for each read
                    raise TimeoutError("the answer kept trickling in")
                if sum(map(len, parts)) > LARGEST_REPLY_BYTES:
                    raise UnscoredError(f"{self.base_url} answered with over {LARGEST_REPLY_BYTES} bytes")
        return b"".join(parts)

    def _said(self, refusal: urllib.error.HTTPError) -> str:
        """Return the beginning of a refusal's text, as far as it came; some servers repeat the key in it."""
        with refusal, contextlib.suppress(OSError, http.client.HTTPException):
            said = refusal.read(EXCERPT).decode("utf-8", "replace")
            return said.replace(self.key, "***") if self.key else said
        return ""

    def _explained(self, error: Exception) -> Exception:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, TimeoutError):
            return TimeoutError(f"{self.base_url} did not answer within {self.timeout_s:g} s")
        return UnscoredError(f"{self.base_url} cannot be reached: {cause}")

    def _wait_s(self, attempt: int, retry_after: str | None) -> float:
        """Wait as long as the server asked, else exponentially with full jitter."""
        if retry_after is not None and retry_after.strip().isdecimal():
            return min(LONGEST_WAIT_S, float(retry_after))
        return JITTER.uniform(0, min(LONGEST_WAIT_S, self.backoff_s * 2.0**attempt))


def _content(reply: bytes) -> str:
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UnscoredError(f"the judge's answer is no chat completion: {reply[:EXCERPT]!r}") from error
    if not isinstance(content, str):
        raise UnscoredError(f"the judge's answer holds no text: {reply[:EXCERPT]!r}")
    return content
