"""Values as data: frames of JSON with Python's types, read as if an enemy had written them.

A frame is four bytes of length and that much JSON. `null`, booleans, texts and finite numbers stand for
themselves; everything else is a list that begins with its kind. Nothing that is read is ever executed.
"""

from __future__ import annotations

import collections
import importlib
import json
import math
import operator
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
COLLECTION_KINDS = frozenset(COLLECTIONS.values())
PATHS = ("pathlib.PosixPath", "pathlib.PurePosixPath")
ADDRESSES = tuple(f"ipaddress.IPv{n}{what}" for n in "46" for what in ("Address", "Network", "Interface"))
AS_TEXT = ("decimal.Decimal", *PATHS, *ADDRESSES, "uuid.UUID", "zoneinfo.ZoneInfo")
SPACES = ("types.SimpleNamespace", "argparse.Namespace")
CLASSES = {kind.__name__: kind for kind in (*COLLECTIONS, *SCALARS, dict, bool, str, type(None))}
CHANGEABLE = {  # types of data with an identity
    *(list, dict, set, bytearray),
    *(collections.deque, collections.defaultdict, collections.OrderedDict, collections.Counter),
}
KNOWN: dict[str, Callable[[Any], tuple[Any, ...]]] = {  # types of the library that are data
    **dict.fromkeys(("builtins.dict_keys", "builtins.dict_values"), lambda x: (list(x),)),
    "builtins.dict_items": lambda x: (list(x),),
    "array.array": lambda x: (x.typecode, x.tolist()),
    "collections.ChainMap": lambda x: tuple(x.maps),
    "collections.OrderedDict": lambda x: (list(x.items()),),
    **dict.fromkeys(SPACES, lambda x: (dict(vars(x)),)),
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
MAKERS: dict[str, Callable[..., Any]] = {  # where a type's own parts are not what it is called with
    "builtins.dict_keys": lambda keys: dict.fromkeys(keys).keys(),
    "builtins.dict_values": lambda values: dict(enumerate(values)).values(),
    "builtins.dict_items": lambda pairs: dict(pairs).items(),
    "types.SimpleNamespace": lambda names: types.SimpleNamespace(**names),
    # a map of the program could be shorter in a loop than by its length
    "collections.ChainMap": lambda *maps: collections.ChainMap(*map(dict, maps)),
    "argparse.Namespace": lambda names: importlib.import_module("argparse").Namespace(**names),
}
# modules whose import does something, or whose exceptions tell a runner of tests to skip or to stop
NO_LIBRARY = set("__main__ antigravity bdb doctest idlelib lib2to3 pdb test this turtledemo unittest".split())
ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


class FrameError(Exception):
    """What came back is not a frame of data."""


def frame(message: Any) -> bytes:
    """Return a message of JSON as a frame."""
    text = ENCODER.encode(message).encode()
    return HEAD.pack(len(text)) + text


def write_frame(fd: int, message: Any) -> None:
    """Write a message of JSON."""
    write(fd, frame(message))


def write(fd: int, data: bytes) -> None:
    """Write bytes."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


class Frames:
    """The frames that come from a descriptor, which nothing else reads."""

    def __init__(self, fd: int) -> None:
        self.fd, self._left = fd, b""

    def read(self) -> Any:
        """Read a message of JSON; EOFError if the other side is gone, FrameError if it is none."""
        data = self._left or os.read(self.fd, 1 << 16)
        if not data:
            raise EOFError("the other side has ended")
        if len(data) < HEAD.size:
            data += _read_exactly(self.fd, HEAD.size - len(data))
        (length,) = HEAD.unpack_from(data)
        if length > LONGEST_FRAME:
            raise FrameError(f"a message of {length} bytes")
        if (missing := HEAD.size + length - len(data)) > 0:
            data += _read_exactly(self.fd, missing)
        end = HEAD.size + length
        self._left = data[end:]
        return parse(data[HEAD.size : end])


def parse(text: bytes) -> Any:
    """Return a message; raise FrameError if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not a message: {error}") from None


def encode(value: Any, export: Callable[[Any], Any], refer: Callable[[Any, int], Any], depth: int = 0) -> Any:
    """Return a value as JSON.

    Args:
        value: anything.
        export: turns what is not data into something that is.
        refer: returns what stands for data with an identity, given its depth, or None: then it is copied.
        depth: of the value in another.

    Raises:
        FrameError: nested too deeply.
    """
    if is_json(value):
        return value
    if depth > DEEPEST:
        raise FrameError(f"a value is nested more than {DEEPEST} levels deep")
    kind: type = type(value)
    if has_identity(value, kind) and (message := refer(value, depth)) is not None:
        return message
    return copied(value, export, refer, depth)


def copied(value: Any, export: Callable[[Any], Any], refer: Callable[[Any, int], Any], depth: int) -> Any:
    """Return a value as JSON, as `encode` does, whether it has an identity or not."""
    kind: type = type(value)
    if kind in SCALARS:
        letter, written = SCALARS[kind]
        return [letter, written(value)]
    if kind in COLLECTIONS:
        if all(map(is_json, value)):
            return [COLLECTIONS[kind], list(value)]
        return [COLLECTIONS[kind], [encode(item, export, refer, depth + 1) for item in value]]
    if kind is dict:
        return ["d", [[encode(one, export, refer, depth + 1) for one in pair] for pair in value.items()]]
    return export(value)


def is_json(value: Any) -> bool:
    """Whether a value stands for itself in JSON."""
    kind = type(value)
    if kind is int:
        return bool(-SAFE < value < SAFE)
    if kind is float:
        return math.isfinite(value)
    return value is None or kind is bool or kind is str


def has_identity(value: Any, kind: type) -> bool:
    """Whether a value is data that can be changed in place."""
    return kind in CHANGEABLE or (is_array(kind) and value.ndim > 0 and not value.dtype.names)


def is_array(kind: type) -> bool:
    """Whether a type is numpy's, of arrays."""
    return kind.__name__ == "ndarray" and kind.__module__ == "numpy"


def decode(message: Any, load: Callable[[list[Any]], Any], depth: int = 0) -> Any:
    """Return the value that JSON stands for.

    Args:
        message: as `encode` returned it.
        load: makes a value of what `export` or `refer` have made.
        depth: of the value in another.

    Raises:
        FrameError: not such a value.
    """
    if isinstance(message, dict):
        raise FrameError("an object where a value belongs")
    if not isinstance(message, list):
        return message
    if depth > DEEPEST + 1 or not message or not isinstance(message[0], str):
        raise FrameError("a value that is nested too deeply or has no kind")
    try:
        if message[0] not in BUILDERS:
            return load(message)
        kind, content = message
        if kind in COLLECTION_KINDS and any(isinstance(item, list | dict) for item in content):
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
    if base is str:  # `str(value)` of a member of an enumeration is its name
        return str.__str__(value)
    return dict(value.items()) if base is dict else base(value)


def parts_of(value: Any) -> tuple[str, tuple[Any, ...]] | None:
    """Return the name of a value's type and what such a value is made from; None if it is no known data."""
    kind = type(value)
    name = "numpy.array" if is_array(kind) else name_of(kind)
    if name not in KNOWN or (name == "numpy.array" and value.dtype.names):  # records stay with it
        return None
    if name == "collections.ChainMap" and not all(isinstance(one, dict) for one in value.maps):
        return None
    return name, KNOWN[name](value)


def name_of(kind: type) -> str:
    """Return the name of a type, with its module."""
    return f"{kind.__module__.removesuffix('._local')}.{kind.__qualname__}"  # of pathlib, in Python 3.13


def module(name: str) -> types.ModuleType:
    """Import a module of Python or numpy; FrameError if it is none, or its import fails."""
    if name.partition(".")[0] not in {*sys.stdlib_module_names, "numpy"}:
        raise FrameError(f"not a module of the library: {name!r:.80}")
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise FrameError(f"a module that cannot be imported: {name!r:.80}") from error


def class_name(kind: type) -> list[str] | None:
    """Return the module and the name by which everyone finds a class of the library; None if it is none."""
    module = sys.modules.get(kind.__module__)
    if kind.__module__.partition(".")[0] in {*sys.stdlib_module_names, "numpy"} - NO_LIBRARY:
        if getattr(module, kind.__name__, None) is kind:
            return [kind.__module__, kind.__name__]
        return next((["types", name] for name, one in vars(types).items() if one is kind), None)
    return None


def library_class(place: str, name: str) -> type | None:
    """Return a class of the library that is known by a module and a name; None if there is none."""
    if {place.partition(".")[0], place.rpartition(".")[2]} & NO_LIBRARY:
        return None
    value = getattr(module(place), name, None)
    is_hidden = getattr(value, "__module__", "").partition(".")[0] in NO_LIBRARY  # as numpy.testing.SkipTest
    return value if isinstance(value, type) and not is_hidden else None


def is_data(kind: type) -> bool:
    """Whether the objects of a class are data, so that making one has no effect."""
    return CLASSES.get(kind.__name__) is kind or name_of(kind) in KNOWN or issubclass(kind, BaseException)


def made_from(known: str, parts: Sequence[Any]) -> Any:
    """Return the value of a known type that is made from its parts."""
    place, _, name = known.rpartition(".")
    make = MAKERS.get(known) or getattr(importlib.import_module(place), name)
    value = make(*parts)
    return widened(value) if place == "numpy" else value


def content_of(value: Any) -> Any:
    """Return what is in data with an identity, as plain data that stays as it is."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, set | bytearray):
        return set(value) if isinstance(value, set) else bytes(value)
    return value.copy() if is_array(type(value)) else list(value)


def has_content(value: Any, content: Any) -> bool:
    """Whether nothing was changed in data since that was its content."""
    if is_array(type(value)):
        return bool(value.tobytes() == content.tobytes())
    if isinstance(value, set | bytearray):
        return bool(value == content)
    if len(value) != len(content):
        return False
    if isinstance(value, dict):
        same_values = map(operator.is_, value.values(), content.values())
        return all(map(operator.is_, value, content)) and all(same_values)
    return all(map(operator.is_, value, content))


def fill(value: Any, content: Any) -> None:
    """Give data with an identity another content; FrameError if it cannot hold it."""
    if is_array(type(value)):
        value[...] = content
    elif isinstance(value, list | bytearray):
        value[:] = content
    elif isinstance(value, dict):
        value.clear()
        for key, one in content.items():  # a Counter's `update` would count
            value[key] = one
    elif isinstance(value, set | collections.deque):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(content)
    else:
        raise FrameError("data that cannot be filled")


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
    data = bytearray()
    while len(data) < count:
        part = os.read(fd, min(count - len(data), 1 << 20))
        if not part:
            raise EOFError("the other side has ended")
        data += part
    return bytes(data)
