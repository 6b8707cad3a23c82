"""An HTTP client of JSON, with timeouts, retries, and no key in any message.

httpx is imported when a client is created. A redirect is treated as an error, because following it would
forward the key and drop the body. The system's certificates are used, which include a company's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from retrain.base.errors import ConfigError
from retrain.base.extras import load

T = TypeVar("T")

PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})  # transient statuses, worth a retry
LONGEST_WAIT_S = 30.0
ANSWER_S = 10.0  # a server that runs answers at once, unless it is very busy
LARGEST_ANSWER_BYTES = 1 << 30
EXCERPT = 500  # characters of an error response that are shown
LONGEST_REFUSAL = 1 << 16  # bytes of it that are read
JITTER = random.Random()  # separate generator, so that waiting does not affect seeded ones
HEADER_VALUE = re.compile(r"[!-~]+")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class CallError(Exception):
    """A failed call: `code` is the HTTP status, 0 without a complete response."""

    def __init__(
        self, message: str, code: int = 0, *, is_timeout: bool = False, retry_after: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.is_timeout = is_timeout
        self.retry_after_s = float(retry_after) if retry_after.strip().isdecimal() else None

    @property
    def is_passing(self) -> bool:
        """Whether a retry may succeed."""
        return self.code == 0 or self.code in PASSING


def is_address(url: str) -> bool:
    """Whether a text is an address of HTTP with a host."""
    try:
        parts = urlsplit(url)
        return bool(
            parts.scheme in ("http", "https")
            and parts.hostname
            and parts.port != 0
            and HEADER_VALUE.fullmatch(url)
        )
    except ValueError:  # invalid port, or incomplete IPv6 address
        return False


def key_of(variable: str) -> str:
    """Return the key in the environment variable that an option `key_env` names; "" if it names none.

    Raises:
        ConfigError: the variable is not set, or is no key.
    """
    if not variable:
        return ""
    if not VARIABLE.fullmatch(variable):
        raise ConfigError("key_env: needs the name of an environment variable, not the key itself")
    if key := key_in(variable, "key_env: "):
        return key
    hint = 'export it, or use key_env = "" to send none'
    raise ConfigError(f"key_env: the environment variable {variable} is not set; {hint}")


def key_in(variable: str, where: str = "the environment variable ") -> str:
    """Return the key in an environment variable, "" if it is not set; a ConfigError if it is no key."""
    key = os.environ.get(variable, "").strip()
    if key and not HEADER_VALUE.fullmatch(key):
        what = "is not a valid key: it contains blanks, line breaks or non-ASCII characters"
        raise ConfigError(f"{where}{variable} {what}")
    return key


def answer_of(address: str, body: bytes | None = None, timeout_s: float = ANSWER_S) -> tuple[int, str]:
    """Return the status with which an address answers, or 0 and why it does not. Not by httpx, an extra's.

    A `body` is posted as JSON, and a redirect of it is an answer; else redirects are followed. No secret is
    sent, and no reason has the address, whose path or query may be one.
    """
    import http.client
    import urllib.error
    import urllib.request

    class Refusing(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: Any) -> None:
            return None

    opener = urllib.request.build_opener(*([Refusing] if body is not None else []))
    try:
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"} if body else {})
        with opener.open(request, timeout=timeout_s) as answer:
            return int(answer.status), ""
    except urllib.error.HTTPError as refusal:
        refusal.close()
        return refusal.code, ""
    except urllib.error.URLError as error:
        return 0, getattr(error.reason, "strerror", None) or str(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, str(error) or type(error).__name__


class Client:
    """What calls of one address have in common: a key that no message shows, and retries."""

    def __init__(self, url: str, key: str) -> None:
        self._url, self._key = url.rstrip("/"), key
        self._closed = threading.Event()

    def persist(self, attempt: Callable[[], T], *, attempts: int, first_wait_s: float) -> T:
        """Call `attempt` until it succeeds; a permanent CallError is raised at once, as is the last one.

        The wait between attempts is the server's Retry-After, else exponential backoff with full jitter.
        """
        for number in range(attempts):
            try:
                return attempt()
            except CallError as error:
                if not error.is_passing or number + 1 == attempts:
                    raise
                wait_s = error.retry_after_s
                if wait_s is None:
                    wait_s = JITTER.uniform(0, min(LONGEST_WAIT_S, first_wait_s * 2.0**number))
                if self._closed.wait(min(LONGEST_WAIT_S, wait_s)):
                    raise
        raise ValueError(f"attempts: got {attempts}; needs at least 1")

    def stop(self) -> None:
        """End waits between attempts; calls in flight continue."""
        self._closed.set()

    def refusal(self, said: bytes, code: int, retry_after: str = "") -> CallError:
        """Return the error for a response that is none of success."""
        text = self.masked(said.decode("utf-8", "replace"))
        return CallError(text[:EXCERPT], code, retry_after=retry_after)

    def masked(self, text: str) -> str:
        """Return text without the key, which some servers repeat; to be cut afterwards, never before."""
        return text.replace(self._key, "***") if self._key else text


@cache
def tls() -> ssl.SSLContext:
    """Return this process's settings of TLS; reading the certificates takes 20 ms."""
    return ssl.create_default_context()


class HttpClient(Client):
    """Posts JSON to paths below one address, from any thread."""

    def __init__(
        self,
        url: str,
        *,
        key: str,
        timeout_s: float,
        extra: str,
        who: str,
        largest_answer_bytes: int = LARGEST_ANSWER_BYTES,
    ) -> None:
        """Create the client without connecting; ConfigError if httpx, of an `extra`, is missing for `who`.

        The `key`, unless it is empty, is sent as a bearer token; `timeout_s` limits a whole call.
        """
        super().__init__(url, key)
        self._httpx = load("httpx", extra, who)
        self._timeout_s = timeout_s
        self._largest = largest_answer_bytes
        self._client = self._httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=timeout_s,
            limits=self._httpx.Limits(max_connections=None),  # the caller limits concurrent calls
            verify=tls(),
        )

    def post(self, path: str, body: Mapping[str, Any]) -> bytes:
        """Make one call and return the response; a CallError if it is refused, slow, too long, or cut off."""
        return self._call("POST", path, dict(body))

    def get(self, path: str) -> bytes:
        """Return what is at a path; a CallError as of `post`."""
        return self._call("GET", path, None)

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        httpx, deadline = self._httpx, time.monotonic() + self._timeout_s
        try:
            with self._client.stream(method, self._url + path, json=body) as answer:
                if not answer.is_success:
                    raise self._refusal(answer, deadline)
                return self._read(answer, deadline)
        except httpx.TimeoutException as error:
            raise self._too_slow() from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, RuntimeError) as error:
            raise CallError(self.masked(str(error) or type(error).__name__)) from error

    def close(self) -> None:
        """Close the connections; safe to call twice."""
        self.stop()
        self._client.close()

    def _read(self, answer: Any, deadline: float) -> bytes:
        content = bytearray()
        for part in answer.iter_bytes():
            content += part
            if time.monotonic() > deadline:  # httpx limits each read, not the whole call
                raise self._too_slow()
            if len(content) > self._largest:
                raise CallError(f"the answer is longer than {self._largest} bytes")
        return bytes(content)

    def _refusal(self, answer: Any, deadline: float) -> CallError:
        body = b""
        with contextlib.suppress(self._httpx.HTTPError):
            for part in answer.iter_bytes():
                body += part
                if len(body) >= LONGEST_REFUSAL or time.monotonic() > deadline:
                    break
        return self.refusal(body, answer.status_code, answer.headers.get("Retry-After", ""))

    def _too_slow(self) -> CallError:
        return CallError(f"no complete answer within {self._timeout_s:g} s", is_timeout=True)


def read_json(answer: bytes, masked: Callable[[str], str]) -> Any:
    """Return the value of a JSON response, or raise a CallError; `masked` returns a text without the key."""
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        shown = masked(answer.decode("utf-8", "replace"))[:80]
        raise CallError(f"the answer is not JSON: {shown!r}") from error
