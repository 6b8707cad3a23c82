"""Makes outside text (names, messages, logs) safe to show on a terminal, and quotes paths for a shell."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

# Escape sequences are removed whole; otherwise their parameters would remain as visible text.
_ESCAPES = re.compile(
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC: titles, links, clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c]*(?:\x1b\\|\x9c)?"  # DCS, SOS, PM, APC
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor
    r"|\x1b[ -/]*[0-~]?"
)
_READ_AHEAD = 16  # read this many times the limit, so that megabytes of escapes cost nothing


def plain(text: str, limit: int = 200) -> str:
    """Return `text` on one line, without anything that a terminal would interpret or hide.

    Escape sequences, control characters (C0, C1), bidirectional and zero-width controls, lone
    surrogates and private-use characters are removed; white space becomes a single space. At
    most `limit` characters, the last one an ellipsis if something was cut.
    """
    if text.isascii() and text.isprintable() and len(text) <= limit and "  " not in text:
        return text.strip()
    visible = _ESCAPES.sub("", text[: limit * _READ_AHEAD])
    # str.isprintable is false for exactly Unicode's "other" and "separator" characters
    kept = "".join(c if c.isprintable() else " " if c.isspace() else "" for c in visible)
    line = " ".join(kept.split())
    cut = len(line) > limit or len(text) > limit * _READ_AHEAD
    return line[: limit - 1].rstrip() + "…" if cut else line


def plain_lines(text: str) -> list[str]:
    """Return lines, indentation kept, without anything that a terminal would interpret or hide."""
    visible = _ESCAPES.sub("", text).expandtabs(4)
    return ["".join(map(_visible, line)).rstrip() for line in visible.splitlines()]


def as_typed(path: Path) -> str:
    """Return a path quoted for a shell, for commands that users copy."""
    return shlex.quote(str(path))


def count_of(number: int, noun: str) -> str:
    """Return `1 run`, `2 runs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def counts_of(names: Iterable[str]) -> str:
    """Return how often each name occurs, the most frequent first: `2 done, 1 failed`."""
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())


def first_of(names: Sequence[str], shown: int = 5) -> str:
    """Return the first names of many: `a, b and 3 more`."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else ""
