"""Values as data: frames of JSON with Python's types, read as if an enemy had written them.

A frame is four bytes of length and that much JSON. `null`, booleans, texts and finite numbers stand for
themselves; everything else is a list that begins with its kind. Nothing that is read is ever executed.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from typing import Any

LONGEST_FRAME = 16 << 20
DEEPEST = 100
HEAD = struct.Struct(">I")
SAFE = 1 << 53
BUILDERS: dict[str, Callable[[list[Any]], Any]] = {"l": list, "t": tuple, "s": set, "z": frozenset}
KINDS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}


class FrameError(Exception):
    """What came back is not a frame of data."""


def frame(message: Any) -> bytes:
    """Return a message of JSON as a frame."""
    text = json.dumps(message, allow_nan=False).encode()
    return HEAD.pack(len(text)) + text


def write_frame(fd: int, message: Any) -> None:
    """Write a message of JSON."""
    left = memoryview(frame(message))
    while left:
        left = left[os.write(fd, left) :]


def read_frame(fd: int) -> Any:
    """Read a message of JSON.

    Raises:
        EOFError: the other side is gone.
        FrameError: not a frame.
    """
    (length,) = HEAD.unpack(read_exactly(fd, HEAD.size))
    if length > LONGEST_FRAME:
        raise FrameError(f"a message of {length} bytes")
    return parse(read_exactly(fd, length))


def parse(text: bytes) -> Any:
    """Return a message.

    Raises:
        FrameError: not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not a message: {error}") from None


def read_exactly(fd: int, count: int) -> bytes:
    """Read a number of bytes.

    Raises:
        EOFError: there are fewer.
    """
    parts, left = [], count
    while left:
        part = os.read(fd, min(left, 1 << 20))
        if not part:
            raise EOFError("the other side has ended")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def encode(value: Any, export: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return a value as JSON; `export` turns what is not data into something that is.

    Raises:
        FrameError: nested too deeply.
    """
    if depth > DEEPEST:
        raise FrameError(f"a value is nested more than {DEEPEST} levels deep")
    kind: type = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -SAFE < value < SAFE else ["i", hex(value)]
    if kind is float:
        return value if math.isfinite(value) else ["f", repr(value)]
    if kind in KINDS:
        return [KINDS[kind], [encode(item, export, depth + 1) for item in value]]
    if kind is dict:
        pairs = [[encode(k, export, depth + 1), encode(v, export, depth + 1)] for k, v in value.items()]
        return ["d", pairs]
    if kind in (bytes, bytearray):
        return ["b" if kind is bytes else "a", value.hex()]
    if kind is complex:
        return ["c", repr(value.real), repr(value.imag)]
    return export(value)


def decode(message: Any, load: Callable[[list[Any]], Any], depth: int = 0) -> Any:
    """Return the value that JSON stands for; `load` makes one of what `export` has made.

    Raises:
        FrameError: not such a value.
    """
    if not isinstance(message, list):
        if message is None or isinstance(message, bool | str | int | float):
            return message
        raise FrameError("an object where a value belongs")
    if depth > DEEPEST or not message or not isinstance(message[0], str):
        raise FrameError("a value that is nested too deeply or has no kind")
    kind, *rest = message
    try:
        if kind in BUILDERS:
            return BUILDERS[kind]([decode(item, load, depth + 1) for item in rest[0]])
        if kind == "d":
            return {decode(k, load, depth + 1): decode(v, load, depth + 1) for k, v in rest[0]}
        if kind in ("i", "f", "b", "a", "c"):
            return _scalar(kind, rest)
        return load(message)
    except (ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        raise FrameError(f"not a value: {error}") from None


def _scalar(kind: str, rest: list[Any]) -> Any:
    if kind == "i":
        return int(rest[0], 16)
    if kind == "f":
        return float(rest[0])
    if kind == "c":
        return complex(float(rest[0]), float(rest[1]))
    data = bytes.fromhex(rest[0])
    return data if kind == "b" else bytearray(data)
