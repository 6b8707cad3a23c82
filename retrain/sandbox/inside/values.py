"""Values as data: frames of JSON with Python's types, read as if an enemy had written them.

A frame is four bytes of length and that much JSON. `null`, booleans, texts and finite numbers stand for
themselves; everything else is a list that begins with its kind. Nothing that is read is ever executed.
"""

from __future__ import annotations

import collections
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
# arrays convert what they are compared with; below, whole numbers stay apart (halves are always too coarse)
NARROW = {"float16": ("float64", 0), "float32": ("float64", 1 << 24), "complex64": ("complex128", 1 << 24)}
COLLECTIONS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}
SCALARS: dict[type, tuple[str, Callable[[Any], str]]] = {
    int: ("i", hex),
    float: ("f", repr),
    complex: ("c", repr),
    bytes: ("b", bytes.hex),
    bytearray: ("a", bytearray.hex),
}
BUILDERS: dict[str, Callable[[Any], Any]] = {
    **{kind: build for build, kind in COLLECTIONS.items()},
    "d": dict,
    "i": lambda text: int(text, 16),
    "f": float,
    "c": complex,
    "b": bytes.fromhex,
    "a": bytearray.fromhex,
}


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
    (length,) = HEAD.unpack(_read_exactly(fd, HEAD.size))
    if length > LONGEST_FRAME:
        raise FrameError(f"a message of {length} bytes")
    return parse(_read_exactly(fd, length))


def parse(text: bytes) -> Any:
    """Return a message; raise FrameError if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not a message: {error}") from None


def encode(value: Any, export: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return a value as JSON; `export` turns what is not data into something that is.

    Raises:
        FrameError: nested too deeply.
    """
    if depth > DEEPEST:
        raise FrameError(f"a value is nested more than {DEEPEST} levels deep")
    kind: type = type(value)
    is_safe = -SAFE < value < SAFE if kind is int else kind is float and math.isfinite(value)
    if value is None or is_safe or kind in (bool, str):
        return value
    if kind in COLLECTIONS:
        return [COLLECTIONS[kind], [encode(item, export, depth + 1) for item in value]]
    if kind is dict:
        return ["d", [[encode(one, export, depth + 1) for one in pair] for pair in value.items()]]
    if kind in SCALARS:
        letter, written = SCALARS[kind]
        return [letter, written(value)]
    return export(value)


def decode(message: Any, load: Callable[[list[Any]], Any], depth: int = 0) -> Any:
    """Return the value that JSON stands for; `load` makes one of what `export` has made.

    Raises:
        FrameError: not such a value.
    """
    if not isinstance(message, list):
        if isinstance(message, dict):
            raise FrameError("an object where a value belongs")
        return message
    if depth > DEEPEST or not message or not isinstance(message[0], str):
        raise FrameError("a value that is nested too deeply or has no kind")
    kind, *rest = message
    try:
        if kind not in BUILDERS:
            return load(message)
        (content,) = rest
        if kind in COLLECTIONS.values():
            content = [decode(item, load, depth + 1) for item in content]
        elif kind == "d":
            content = [[decode(one, load, depth + 1) for one in pair] for pair in content]
        return BUILDERS[kind](content)
    except (ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        raise FrameError(f"not a value: {error}") from None


def plain(base: type, value: Any) -> Any:
    """Return data of a subclass as data of its base."""
    if base in (list, tuple, set, frozenset):
        return base(iter(value))
    return dict(value.items()) if base is dict else base(value)


def merged(old: Any, new: Any) -> Any:
    """Return `new`; a list, dictionary or set of the same kind at the same place is changed in place."""
    if type(old) is not type(new):
        return new
    if isinstance(new, list | tuple):
        items = [*map(merged, old, new), *new[len(old) :]]
        if isinstance(old, tuple):
            return tuple(items)
        old[:] = items
    elif isinstance(new, dict):
        items = [(key, merged(old[key], value) if key in old else value) for key, value in new.items()]
        old.clear()
        for key, value in items:  # a Counter's `update` would count
            old[key] = value
    elif isinstance(new, set):
        old.intersection_update(new)
        old.update(new)
    elif isinstance(new, bytearray):
        old[:] = new
    elif isinstance(new, collections.deque):
        old.clear()
        old.extend(new)
    elif type(new).__name__ == "ndarray" and (new.shape, new.dtype) == (old.shape, old.dtype):
        old[...] = new
    else:
        return new
    return old


def widened(array: Any) -> Any:
    """Return numpy's array; in 64 bits where a narrow number would be equal to several whole ones.

    One without dimensions becomes a number of Python's, which wraps around and rounds nowhere.

    Raises:
        FrameError: it holds records, whose fields could be narrow.
    """
    if array.dtype.names:
        raise FrameError("an array of records")
    if not array.ndim and array.dtype.kind in "biufc":
        return array.item()
    wide, exact_below = NARROW.get(array.dtype.name, ("", 0))
    return array.astype(wide) if wide and not abs(array).max(initial=0) < exact_below else array


def _read_exactly(fd: int, count: int) -> bytes:
    """Read a number of bytes; raise EOFError if there are fewer."""
    found = bytearray()
    while len(found) < count:
        part = os.read(fd, min(count - len(found), 1 << 20))
        if not part:
            raise EOFError("the other side has ended")
        found += part
    return bytes(found)
