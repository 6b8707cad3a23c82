"""Removes secrets from text that is recorded or shown: the one place that knows what a secret looks like.

Errors of other people's code (a reward's HTTP client, a logger) quote addresses, headers and keys. What users
print and what errors say passes through here before it reaches a record, `output.log` or the terminal.
Prompts and completions do not: they are data, and must stay as they are.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from typing import Any, TextIO, cast

HIDDEN = "***"
SHORTEST_SECRET = 8  # characters of a variable's value; a shorter one would hide ordinary words
LONGEST_ERROR_BYTES = 4096  # of an error in a record
REST = " [... the rest is in output.log]"

_SECRET_NAME = r"(?:^|_)(?:API)?(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)"
_USER = r"//[^/?#\s]*@"
_KEY = (
    r"(?:api|access|secret|private|auth|id|refresh|session|security|client|app|x-amz|x-goog)?[-_]?"
    r"(?:key|keyid|key-id|token|secret|password|passwd|pwd|signature|sig|credentials?)"
)
_SECRETS = (  # what stands before a secret, and the secret
    rf"([?&;]{_KEY}=)[^&#\s\"'<>]+",
    r"\b((?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:(?:basic|bearer|token|digest)\s+)?)[^\s\"',}]+",
    r"\b(bearer(?:\s+|%20))[\w.~+/=-]{6,}",
    # `api_key=abc`, `"x-api-key": "abc"`; not `api_key: unknown key`, which is about the key's name
    rf"\b({_KEY}(?:=|[\"']\s*[:=]\s*)[\"']?)[^\s\"',&}})]{{6,}}",
)


def redacted(text: str) -> str:
    """Return a text without secrets.

    Removed are users and passwords in addresses, keys in their queries, bearer tokens and values of
    authorization headers, `api_key=...` and the like, and the values of environment variables that are named
    like keys (`..._API_KEY`, `HF_TOKEN`).
    """
    for value in _values(len(os.environ)):
        if value in text:
            text = text.replace(value, HIDDEN)
    if "//" in text:
        text = without_user(text)
    for pattern in _SECRETS:  # compiled when first needed: most processes print no error
        text = re.sub(pattern, rf"\1{HIDDEN}", text, flags=re.IGNORECASE)
    return text


@cache  # reading the environment takes 50 us, more than all the rest; a plugin that loads a file adds to it
def _values(variables: int) -> tuple[str, ...]:
    """Return the values of variables named like keys, longest first; paths to files of keys are none."""
    secrets = {
        value
        for name, value in os.environ.items()
        if len(value) >= SHORTEST_SECRET
        and not value.startswith("/")
        and re.search(_SECRET_NAME, name, re.IGNORECASE)
    }
    return tuple(sorted(secrets, key=len, reverse=True))


def without_user(address: str) -> str:
    """Return an address, or a text with addresses, without their users and passwords."""
    return re.sub(_USER, "//", address)


def recorded_error(text: str) -> str:
    """Return an error as records hold it: without secrets, in at most `LONGEST_ERROR_BYTES`."""
    text = redacted(text)
    if (
        len(text) * 4 <= LONGEST_ERROR_BYTES
        or len(encoded := text.encode(errors="replace")) <= LONGEST_ERROR_BYTES
    ):
        return text
    return encoded[: LONGEST_ERROR_BYTES - len(REST)].decode(errors="ignore") + REST


class _Redacting:
    """A text stream whose writes pass through `redacted`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(redacted(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def cover_output(*, results: bool = True) -> None:
    """Redact what this process prints from now on; without `results`, standard error only.

    What is written to the descriptors, as by other programs and code in C, passes as it is.
    """
    sys.stderr = cast(TextIO, _Redacting(sys.stderr))
    if results:
        sys.stdout = cast(TextIO, _Redacting(sys.stdout))
