"""Removes secrets from text that is recorded or shown: the one place that knows what a secret looks like.

Errors of other people's code (a reward's HTTP client, a logger) quote addresses, headers and keys. What users
print and what errors say passes through here before it reaches a record, `output.log` or the terminal.
Prompts and completions do not: they are data, and must stay as they are.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterable
from functools import cache
from typing import Any, TextIO, cast
from urllib.parse import quote

HIDDEN = "***"
SHORTEST_SECRET = 8  # characters of a variable's value; a shorter one would hide ordinary words
LONGEST_ERROR_BYTES = 4096  # of an error in a record
LONGEST_KEY = 20_000  # characters of a private key
REST = " [... the rest is in output.log]"

_SECRET_VARIABLE = (  # `OPENAI_API_KEYS`, `PGPASSWORD`, `HF_TOKEN`, `DB_PASS`; not `TOKENIZERS_PARALLELISM`
    r"(?:^|_)(?:KEY|TOKEN|CREDENTIAL|PASS|PAT|AUTH)S?(?:_(?!FILE|PATH|DIR|SOCK)|$)|._PWD$"
    r"|SECRET|PASSWORD|PASSWD|PASSPHRASE|APIKEY"
)
_USER = r"//[^/?#\s\"<>\\]*@"
_WORD = r"(?<![\w-])[\w-]{0,64}?"  # what stands before the part of a name that says what it holds
_QUERY_KEY = r"(?:key|token|secret|passw(?:or)?d|pwd|pass|signature|sig|credentials?|auth)"
_KEY = (  # of names that are certain: `my_api_key`, `x-goog-api-key`, `CLIENT_SECRET`, not `pad_token`
    rf"{_WORD}(?:(?:api|access|private|subscription|signing)(?:[-_]|%5F)?key(?:[-_]?id)?"
    r"|secret(?:[-_]?access)?(?:[-_]?key)?"
    r"|passw(?:or)?d|passphrase|(?:api|access|private|secret|auth|id|refresh|session|security|bearer|app)[-_]?token"
    r"|credentials?|signature)"
)
_SHORT_KEY = r"(?<![\w.-])(?:key|token|keyid|key-id|pwd|sig)"
_VARIABLE = r"\b(?-i:[A-Z][A-Z0-9_]{0,64}_(?:KEY|TOKEN|SECRET|PASSWORD))"
_QUOTE = r"\\*[\"']"  # also within JSON that a text quotes
_SECRETS = (  # what stands before a secret, and the secret
    rf"((?:[?&;]|%3F|%26)[\w.%-]{{0,64}}?{_QUERY_KEY}(?:=|%3D))(?:(?!%26)[^&#\s\"'<>])+",
    rf"\b((?:proxy-)?authorization(?:{_QUOTE})?\s*[:=,]\s*b?(?:{_QUOTE})?(?:[a-z][\w-]*\s+)?)[^\s\"'\\,}})]+",
    rf"\b((?:set-)?cookie(?:{_QUOTE})?\s*[:,]\s*b?(?:{_QUOTE})?)[^\r\n\"'\\]+",
    r"\b(bearer(?:\s+|%20|:\s*))[\w.~+/=-]{6,}",
    # `api_key=abc`, `"x-api-key": "abc"`; not `api_key: unknown key`, which is about the key's name
    rf"((?:{_KEY}|{_SHORT_KEY}|{_VARIABLE})(?:=|%3D|{_QUOTE}\s*[:=]\s*)(?:b?{_QUOTE})?)[^\s\"'\\,&}})]{{6,}}",
    rf"({_KEY}{_QUOTE},\s*b?{_QUOTE})[^\s\"'\\]+",  # a header as a pair
    rf"({_KEY}:\s*b?{_QUOTE})[^\s\"'\\]{{6,}}",
    rf"({_KEY}:[ \t]+)(?=[^\s\d]*\d)[^\s\"'\\,;/][^\s\"'\\,;]{{7,}}",  # as a line, `X-Api-Key: abc123def`
    rf"((?<![\w-])--[\w-]{{0,64}}?{_QUERY_KEY}(?:[= ]|{_QUOTE},\s*{_QUOTE}))[^\s\"'\\,]{{6,}}",  # option
    r"\b((?-i:sk-|hf_|gh[opsu]_|github_pat_|glpat-|AKIA|AIza|tml-|xox[abp]-))(?-i:[\w-]{16,})",  # of services
    r"\b(?-i:(eyJ)[\w-]{8,}\.[\w-]{8,}\.[\w-]+)",  # signed tokens, as of JWT
)
_KEY_OF = r"(?:[A-Z0-9]{1,16} ){0,3}PRIVATE KEY(?: BLOCK)?-----"
_BEGIN, _END = f"-----BEGIN {_KEY_OF}", f"-----END {_KEY_OF}"
_BREAK = r"(?:\\+[nrt\"']|[\s\"',>|])+"  # between lines of a key, also as a text or a list quotes them
_HEADER = rf"{_BREAK}(?:Proc-Type|DEK-Info|Comment|Version):[^\n\\]{{1,100}}"
_LINE, _LAST_LINE = "[A-Za-z0-9+/=]{16,}", "[A-Za-z0-9+/]{1,15}=*"
_PRIVATE_KEYS = (  # whole, cut at its end, cut at its beginning
    rf"({_BEGIN})(?:(?!-----BEGIN)[\s\S]){{1,{LONGEST_KEY}}}?(?={_END})",
    rf"({_BEGIN})(?:{_HEADER})*(?:{_BREAK}{_LINE})+(?:{_BREAK}{_LAST_LINE}(?![^\s\\]))?",
    rf"()(?<![A-Za-z0-9+/=])(?:{_LINE}{_BREAK})+(?:{_LAST_LINE}{_BREAK})?(?={_END})",
)
_OPEN_KEY = rf"{_BEGIN}(?:{_HEADER})*(?:{_BREAK}{_LINE})*(?:{_BREAK})?\Z"  # whose lines are still printed
# one of them, in small letters, is in whatever a pattern finds
_HINTS = "key token secret pass pwd sig cred auth cookie bearer".split()
_HINTS += "sk- hf_ gh github_pat_ glpat- akia aiza eyj tml- xox".split()


def redacted(text: str) -> str:
    """Return a text without secrets.

    Removed are users and passwords in addresses, keys in their queries, bearer tokens, cookies and values of
    authorization headers, `api_key=...` and the like, private keys (PEM), and the values of environment
    variables that are named like keys (`..._API_KEY`, `HF_TOKEN`).
    """
    for value in _values():
        if value in text:
            text = text.replace(value, HIDDEN)
    if "//" in text:
        text = without_user(text)
    if "PRIVATE KEY" in text:
        for pattern in _PRIVATE_KEYS:
            text = re.sub(pattern, rf"\1{HIDDEN}", text)
    lower = text.lower()
    if any(hint in lower for hint in _HINTS):
        for pattern in _SECRETS:  # compiled when first needed: most processes print no error
            text = re.sub(pattern, rf"\1{HIDDEN}", text, flags=re.IGNORECASE)
    return text


def _values() -> list[str]:
    """Return the values of variables named like keys, longest first; those of removed variables too."""
    new = {os.environ[name] for name in os.environ if _is_secret(name)} - _known
    if new:  # a program may take a key out of its environment, and use it
        _known.update(new)
        forms = set()  # as they may be quoted: whole, line by line, key by key, and encoded for an address
        for value in new:
            if not (value.startswith("/") and os.path.exists(value)):  # noqa: PTH110 - a file of keys is none
                for part in {value, *re.split(r"[\s,;]+", value)}:
                    forms |= {part, quote(part, safe=""), repr(part)[1:-1]}
        _forms.extend(form for form in forms if len(form) >= SHORTEST_SECRET)
        _forms.sort(key=len, reverse=True)
    return _forms


_known: set[str] = set()
_forms: list[str] = []  # of the known values


@cache
def _is_secret(name: str) -> bool:
    return re.search(_SECRET_VARIABLE, name, re.IGNORECASE) is not None


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
    """A text stream whose lines pass through `redacted`: `print` writes the parts of a line one by one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begin()
        os.register_at_fork(after_in_child=self._begin)  # another thread may have been printing

    def _begin(self) -> None:
        self._begun = ""  # a line without its end
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            lines, end, begun = (self._begun + text).rpartition("\n")
            begin = lines.rfind("-----BEGIN ", -LONGEST_KEY)
            if begin >= 0 and re.search(_OPEN_KEY, lines[begin:] + end):  # printed line by line
                self._begun += text
                return len(text)
            self._begun = begun
            if end:
                self._stream.write(redacted(lines + end))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._lock:
            begun, self._begun = self._begun, ""
            if begun:
                self._stream.write(redacted(begun))
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def cover_output(*, results: bool = True) -> None:
    """Redact what this process prints from now on; without `results`, standard error only.

    What is written to the descriptors, as by other programs and code in C, passes as it is.
    """
    sys.stderr = cast(TextIO, _Redacting(sys.stderr))
    if results:
        sys.stdout = cast(TextIO, _Redacting(sys.stdout))
