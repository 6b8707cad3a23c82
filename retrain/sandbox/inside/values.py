"""Values as data: frames of JSON with Python's types, read as if an enemy had written them.

A frame is four bytes of length and that much JSON. `null`, booleans, texts and finite numbers stand for
themselves; everything else is a list that begins with its kind. Nothing that is read is ever executed.
"""

from __future__ import annotations

import collections
import importlib
import json
import math
import os
import struct
import sys
import types
from collections.abc import Callable, Sequence
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
PATHS = ("pathlib.PosixPath", "pathlib.PurePosixPath")
AS_TEXT = ("decimal.Decimal", *PATHS, "uuid.UUID", "zoneinfo.ZoneInfo")
CLASSES = {kind.__name__: kind for kind in (*COLLECTIONS, *SCALARS, dict, bool, str, type(None))}
KNOWN: dict[str, Callable[[Any], tuple[Any, ...]]] = {  # types of the library that are data
    "builtins.type": lambda x: (x.__name__,),  # one of CLASSES
    **dict.fromkeys(("builtins.range", "builtins.slice"), lambda x: (x.start, x.stop, x.step)),
    "collections.Counter": lambda x: (dict(x),),
    "collections.defaultdict": lambda x: (x.default_factory, dict(x)),
    "collections.deque": lambda x: (list(x), x.maxlen),
    "datetime.date": lambda x: (x.year, x.month, x.day),
    "datetime.datetime": lambda x: (
        *(x.year, x.month, x.day, x.hour, x.minute, x.second, x.microsecond),
        x.tzinfo,
    ),
    "datetime.time": lambda x: (x.hour, x.minute, x.second, x.microsecond, x.tzinfo),
    "datetime.timezone": lambda x: (x.utcoffset(None),),
    "datetime.timedelta": lambda x: (x.days, x.seconds, x.microseconds),
    "fractions.Fraction": lambda x: (x.numerator, x.denominator),
    **dict.fromkeys(AS_TEXT, lambda x: (str(x),)),
    "numpy.array": lambda x: (x.tolist(), str(x.dtype)),
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
    if _is_json(value, kind):
        return value
    if kind in COLLECTIONS:
        return [COLLECTIONS[kind], [encode(item, export, depth + 1) for item in value]]
    if kind is dict:
        return ["d", [[encode(one, export, depth + 1) for one in pair] for pair in value.items()]]
    if kind in SCALARS:
        letter, written = SCALARS[kind]
        return [letter, written(value)]
    return export(value)


def _is_json(value: Any, kind: type) -> bool:
    """Whether a value stands for itself in JSON."""
    if kind is int:
        return bool(-SAFE < value < SAFE)
    if kind is float:
        return math.isfinite(value)
    return value is None or kind in (bool, str)


def decode(message: Any, load: Callable[[list[Any]], Any], depth: int = 0) -> Any:
    """Return the value that JSON stands for; `load` makes one of what `export` has made.

    Raises:
        FrameError: not such a value.
    """
    if isinstance(message, dict):
        raise FrameError("an object where a value belongs")
    if not isinstance(message, list):
        return message
    if depth > DEEPEST or not message or not isinstance(message[0], str):
        raise FrameError("a value that is nested too deeply or has no kind")
    try:
        return _built(*message, load=load, depth=depth) if message[0] in BUILDERS else load(message)
    except (ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        raise FrameError(f"not a value: {error}") from None


def _built(kind: str, content: Any, *, load: Callable[[list[Any]], Any], depth: int) -> Any:
    """Return a value of Python's own types."""
    if kind in COLLECTIONS.values():
        content = [decode(item, load, depth + 1) for item in content]
    elif kind == "d":
        content = [[decode(one, load, depth + 1) for one in pair] for pair in content]
    return BUILDERS[kind](content)


def plain(base: type, value: Any) -> Any:
    """Return data of a subclass as data of its base."""
    if base in (list, tuple, set, frozenset):
        return base(iter(value))
    if base is str:  # `str(value)` of a member of an enumeration is its name
        return str.__str__(value)
    return dict(value.items()) if base is dict else base(value)


def parts_of(value: Any) -> tuple[str, tuple[Any, ...]] | None:
    """Return the name of a value's type and what such a value is made from; None if it is no known data."""
    kind = type(value)
    module = kind.__module__.removesuffix("._local")  # of pathlib, in Python 3.13
    name = "numpy.array" if kind.__name__ == "ndarray" else f"{module}.{kind.__qualname__}"
    is_own = kind is type and CLASSES.get(value.__name__) is not value
    if name not in KNOWN or is_own or (name == "numpy.array" and value.dtype.names):  # records stay with it
        return None
    return name, KNOWN[name](value)


def module(name: str) -> types.ModuleType:
    """Import a module of Python or numpy.

    Raises:
        FrameError: it is none, or its import fails; in tests, which it could end or skip.
    """
    if name.partition(".")[0] not in {*sys.stdlib_module_names, "numpy"}:
        raise FrameError(f"not a module of the library: {name!r:.80}")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise FrameError(f"a module that cannot be imported: {name!r:.80}") from error


def made_from(known: str, parts: Sequence[Any]) -> Any:
    """Return the value of a known type that is made from its parts."""
    if known == "builtins.type":
        return CLASSES[parts[0]]
    place, _, name = known.rpartition(".")
    made = getattr(importlib.import_module(place), name)(*parts)
    return widened(made) if place == "numpy" else made


def merged(old: Any, new: Any) -> Any:
    """Return `new`; a list, dictionary or set of the same kind at the same place is changed in place."""
    if type(old) is not type(new):
        return new
    if isinstance(new, tuple):
        return tuple(_merged_items(old, new))
    if type(new).__name__ == "ndarray" and (new.shape, new.dtype) == (old.shape, old.dtype):
        old[...] = new
        return old
    fill = next((fill for kind, fill in FILLS.items() if isinstance(new, kind)), None)
    if fill is None:
        return new
    fill(old, new)
    return old


def _merged_items(old: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    return [*map(merged, old, new), *new[len(old) :]]


def _fill_list(old: list[Any], new: list[Any]) -> None:
    old[:] = _merged_items(old, new)


def _fill_dict(old: dict[Any, Any], new: dict[Any, Any]) -> None:
    items = [(key, merged(old[key], value) if key in old else value) for key, value in new.items()]
    old.clear()
    for key, value in items:  # a Counter's `update` would count
        old[key] = value


def _fill_set(old: set[Any], new: set[Any]) -> None:
    old.intersection_update(new)
    old.update(new)


def _fill_bytes(old: bytearray, new: bytearray) -> None:
    old[:] = new


def _fill_deque(old: collections.deque[Any], new: collections.deque[Any]) -> None:
    old.clear()
    old.extend(new)


FILLS: dict[type, Callable[[Any, Any], None]] = {  # how an object gets the content of another
    list: _fill_list,
    dict: _fill_dict,
    set: _fill_set,
    bytearray: _fill_bytes,
    collections.deque: _fill_deque,
}


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
