"""Messages from a scoring process to its pool: one line of JSON per call, with the call's token.

Scored code may write to the pipe too. Anything but exactly one valid line is garbage: neither it nor what
arrives with it counts as a reward.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST_LINE = 1 << 16  # bytes; a message is cut at 2,000 characters, each at most six bytes of JSON
SHOWN = 80  # bytes of garbage that are shown
GARBAGE = "garbage"
SCORED = "scored"
AT_THE_START = ("ready", "failed")
OF_A_CALL = (SCORED, "unscored", "timeout", "raised")


@dataclass(frozen=True, slots=True)
class Message:
    """One line: token of the call ("" for none), its outcome, and the reward or a message."""

    token: str
    kind: str
    content: str | float


def line_of(message: Message) -> bytes:
    """Return a message as a line."""
    return json.dumps([message.token, message.kind, message.content]).encode() + b"\n"


def read_line(line: bytes) -> Message:
    """Return the message in a line; garbage if `line_of` did not write it."""
    try:
        token, kind, content = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return garbage(line)
    known = AT_THE_START if token == "" else OF_A_CALL
    wanted = float if kind == SCORED else str
    if not (isinstance(token, str) and isinstance(kind, str) and kind in known and type(content) is wanted):
        return garbage(line)
    return Message(token, kind, content)


def garbage(line: bytes) -> Message:
    """Return a message that reports an invalid line."""
    return Message("", GARBAGE, f"the scoring process wrote {line[:SHOWN]!r} instead of a reply")


def only(messages: Sequence[Message], token: str) -> Message:
    """Return the reply to a call; garbage if there are more lines, or a reply to another call."""
    wrong = next((m for m in messages if m.kind == GARBAGE), None)
    if wrong is not None:
        return wrong
    (first, *more) = messages
    if more or first.token != token:
        return Message("", GARBAGE, "the scoring process sent a reply that belongs to no call")
    return first
