"""Stand-ins for objects of another sandbox, which are never told what they are compared with."""

from __future__ import annotations

import copy
import importlib
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from retrain.plugins.sandbox.inside import values

if TYPE_CHECKING:
    from retrain.plugins.sandbox.inside.peer import Peer


DATA = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
FIXED = (int, float, complex, str, bytes, tuple, frozenset)  # data that no program changes
CONTAINER_VERBS = (
    "add append insert pop remove clear update extend get keys values items setdefault sort reverse copy"
)
DATA_METHODS = {name for kind in DATA for name in dir(kind)} - set(CONTAINER_VERBS.split())
# by which a library would read memory where the other side points
POINTERS = ("__array_", "__cuda_array_", "__dlpack_", "__buffer_", "_as_parameter_")


def signature(function: Any) -> Any:
    """Return the parameters of a function: name, kind, and default if there is one."""
    inspect = importlib.import_module("inspect")  # seldom loaded
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, int(p.kind), () if p.default is p.empty else (p.default,)) for p in parameters]


LOOP: dict[str, Any] = {}


def run(coroutine: Any) -> Any:
    """Return what a coroutine returns, run in the only loop of this process."""
    if "loop" not in LOOP:
        LOOP["loop"] = importlib.import_module("asyncio").new_event_loop()  # seldom loaded
    return LOOP["loop"].run_until_complete(coroutine)


def special(name: str, *, is_asynchronous: bool = False) -> Callable[..., Any]:
    """Return a function that calls a special method of its first argument."""

    async def awaited(value: Any, *arguments: Any) -> Any:
        return await getattr(type(value), name)(value, *arguments)

    def call(value: Any, *arguments: Any) -> Any:
        if is_asynchronous:
            return run(awaited(value, *arguments))
        return getattr(type(value), name)(value, *arguments)

    return call


READING: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (str, bool, int, float, complex, bytes, reversed)},
    **{one.__name__: one for one in (len, iter, next, repr, hash, round, format, dir)},
    **{one.__name__: one for one in (math.floor, math.ceil, math.trunc)},
    "getitem": operator.getitem,
    "index": operator.index,
}
COMPARING = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()
COMPUTING = {
    **{name: getattr(operator, name) for name in (*BINARY, "neg", "pos", "abs", "invert")},
    **{f"i{name.strip('_')}": getattr(operator, f"i{name.strip('_')}") for name in BINARY},
    "divmod": divmod,
}
METHODS: dict[str, Callable[..., Any]] = {  # operations that a stand-in has a special method for
    **READING,
    **COMPARING,
    **COMPUTING,
    **{name: getattr(copy, name) for name in ("copy", "deepcopy")},
    **{name: getattr(operator, name) for name in ("contains", "setitem", "delitem")},
    **{name: special(f"__{name}__") for name in ("enter", "aiter")},
    "exit": lambda *operands: special("__exit__")(*operands) or None,  # an answer that says nothing
    "delattr": delattr,
}
OF_PROGRAM: dict[str, Callable[..., Any]] = {  # operations that tests alone ask for
    "name": operator.getitem,
    "define": dict.setdefault,
    "library": lambda place, name, args, kwargs: getattr(importlib.import_module(place), name)(
        *args, **kwargs
    ),
}
OPERATIONS: dict[str, Callable[..., Any]] = {
    **METHODS,
    **OF_PROGRAM,
    **{name: special(f"__{name}__", is_asynchronous=True) for name in ("anext", "aenter")},
    "aexit": lambda *operands: special("__aexit__", is_asynchronous=True)(*operands) or None,
    **{one.__name__: one for one in (isinstance, issubclass, callable, type, getattr, setattr)},
    "run": run,
    "signature": signature,
    "defines": lambda x, name: getattr(type(x), name, None) is not getattr(object, name, None),
}
LENDING = ("name", "getattr", "getitem", "enter", "aenter")  # operations whose result an object may hold


class StandIn:
    """An object of the other side."""

    __slots__ = ("__weakref__", "_is_class", "_is_made", "_number", "_peer")

    def __init__(self, peer: Peer, number: int, role: str) -> None:
        """Stand for an object in a role: "object", "class", or "made" by calling one."""
        for name, value in {
            "_is_class": role == "class",
            "_is_made": role == "made",
            "_number": number,
            "_peer": peer,
        }.items():
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._peer.call(self._number, args, kwargs, makes=self._is_class)
        # what a class makes is not the one that a function may return later
        return _made(result) if self._is_class else result

    def __getattr__(self, name: str) -> Any:
        if name.startswith(POINTERS):
            raise AttributeError(name)
        return self._peer.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.request("setattr", self, name, value)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Refuse to be subclassed: methods of the tests would have to run beside the program's."""
        self._peer.needs_sharing = True
        raise TypeError("a class of the program cannot be subclassed by tests without shared = true")

    def __instancecheck__(self, instance: Any) -> bool:
        return number_of(instance) is not None and operate("isinstance", instance, self) is True

    def __subclasscheck__(self, other: Any) -> bool:
        return number_of(other) is not None and operate("issubclass", other, self) is True

    def __await__(self) -> Any:
        return awaited(self).__await__()

    def __hash__(self) -> int:
        return int(operate("hash", self))

    def __len__(self) -> int:
        self._peer.check_length(self)
        return int(operate("len", self))

    def __contains__(self, value: Any) -> bool:
        return bool(self._peer.contains(self, value))

    def __copy__(self) -> Any:
        return self._copied("copy")

    def __deepcopy__(self, _: Any) -> Any:
        return self._copied("deepcopy")

    def _copied(self, name: str) -> Any:
        copied = operate(name, self)
        return _made(copied) if self._is_made else copied

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        """Leave a context manager of the program, which may not hide a failure or skip an assertion."""
        return bool(operate("exit", self, kind, error, None)) and self._peer.may_swallow(trace)

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return bool(operate("aexit", self, kind, error, None)) and self._peer.may_swallow(trace)

    async def __aenter__(self) -> Any:
        return operate("aenter", self)

    async def __anext__(self) -> Any:
        return operate("anext", self)

    def __aiter__(self) -> Any:
        self._peer.check_loop()
        return operate("aiter", self)


class Visitor(StandIn):
    """An object of the tests, where the program is: there is nothing to protect."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._peer.request("getattr", self, "__class__")

    @property
    def __signature__(self) -> Any:
        inspect = importlib.import_module("inspect")  # seldom loaded
        return inspect.Signature(
            [
                inspect.Parameter(name, kind, default=(*default, inspect.Parameter.empty)[0])
                for name, kind, default in self._peer.request("signature", self)
            ]
        )


def _define(name: str) -> None:
    """Give stand-ins the special methods of an operation."""
    method = f"__{name.strip('_')}__"
    if method not in vars(StandIn):
        setattr(StandIn, method, lambda self, *others: operate(name, self, *others))
    if name in BINARY or name == "divmod":
        setattr(StandIn, f"__r{name.strip('_')}__", lambda self, other: operate(name, other, self))


for _name in METHODS:
    _define(_name)


def _asked(name: str) -> property:
    return property(lambda self: self.__getattr__(name))


for _name in ("__doc__", "__module__", "__slots__"):
    setattr(StandIn, _name, _asked(_name))
Visitor.__doc__ = StandIn.__doc__  # the property


async def awaited(coroutine: StandIn) -> Any:
    """Return what a coroutine of the other side returns, which runs there."""
    return operate("run", coroutine)


def _made(value: Any) -> Any:
    """Return the stand-in for an object that the tests have made; other values as they are."""
    return value._peer.stand_in(value._number, "made") if isinstance(value, StandIn) else value


def operate(name: str, *operands: Any) -> Any:
    """Let the other side compute, unless that would tell it what its result is compared with."""
    remote = [operand for operand in operands if isinstance(operand, StandIn)]
    remote = remote or [operand for operand in operands if number_of(operand) is not None]
    peer: Peer = remote[0]._peer if isinstance(remote[0], StandIn) else vars(remote[0])["_retrain_peer"]
    is_made = any(isinstance(operand, StandIn) and operand._is_made for operand in remote)
    has_data = len(remote) < len(operands) and (name in COMPARING or name in COMPUTING)
    if has_data and peer.is_judge and not (is_made and name in COMPUTING):
        peer.suspect_comparison(name, operands)
        if name in COMPARING and all(isinstance(one, StandIn) or type(one) in DATA for one in operands):
            if name in ("eq", "ne"):  # `NotImplemented` would be true
                return name == "ne"
            raise TypeError(f"{name!r} is not supported between what the program returned and data")
        return NotImplemented
    result = peer.request(name, *operands)
    return _made(result) if is_made and name in COMPUTING else result


def number_of(value: Any) -> int | None:
    """Return the number of what stands for something on the other side."""
    try:
        number = value._number if isinstance(value, StandIn) else vars(value).get("_retrain_number")
    except TypeError:
        return None
    return number if isinstance(number, int) else None


def attribute_of(value: Any, name: str) -> Any:
    """Return an attribute that only the other side knows, of an exception from there or of its class."""
    members = vars(value)
    if name.startswith("_") or "_retrain_number" not in members:
        raise AttributeError(name)
    return members["_retrain_peer"].request("getattr", value, name)


def data_stand_in(data: Any, peer: Peer, number: int, name: str) -> Any:
    """Return data of a subclass, such as a named tuple; further attributes are asked for."""
    if type(data) not in DATA:
        return data

    def attribute(value: Any, attribute: str) -> Any:
        # data has the special methods of its kind; numpy, copy and others ask for more
        if attribute.startswith(("__", *POINTERS)):
            raise AttributeError(attribute)
        result = peer.request("getattr", value, attribute)
        is_shape = attribute == "shape" and not isinstance(result, str | int | float)
        if is_shape or (attribute in ("ndim", "size") and "numpy" in sys.modules):
            raise AttributeError(f"{attribute}: of an array that it is not")
        return result

    held = peer.held.get(number)
    if isinstance(data, FIXED) and isinstance(held, type(data)) and held == data:
        return held  # so that `is` holds, as for a member of an IntEnum
    own: dict[str, Any] = {"__getattr__": attribute}
    if isinstance(data, dict):  # of a class like Counter, which knows more keys than it has
        own["__missing__"] = lambda self, key: peer.request("getitem", self, key)
    stand_in = type(name, (type(data),), own)(data)
    vars(stand_in).update(_retrain_number=number, _retrain_peer=peer)
    peer.held[number] = stand_in
    return stand_in


MOST_BASES, LONGEST_CHAIN = 20, 8  # classes from one to BaseException; causes of one
FILE_NAMES = ("filename", "filename2", "name", "path", "msg")  # attributes that are no part of `args`


class ExitError(SystemExit):
    """The program's own `SystemExit`, which is no end of the tests."""


class ErrorKind(type):
    """The class of classes of exceptions that were rebuilt: the other side makes their objects."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        members = vars(cls)
        return members["_retrain_peer"].call(members["_retrain_number"], args, kwargs)

    __getattr__ = attribute_of


def rebuilt_class(name: str, bases: Sequence[Any], peer: Peer, number: int) -> type[BaseException]:
    """Return a class of exceptions that stands for one of the other side; FrameError if it cannot be."""
    kinds = [base for base in bases if isinstance(base, type) and issubclass(base, BaseException)]
    if not kinds or len(kinds[0].__mro__) > MOST_BASES:
        raise values.FrameError("an exception of no class")
    members = {
        "_retrain_peer": peer,
        "_retrain_number": number,
        "__getattr__": attribute_of,
        "__str__": lambda error: str(vars(error).get("_retrain_text", "")),
        "__module__": "solution",
    }
    try:
        return cast(type[BaseException], ErrorKind(name, tuple(kinds), members))
    except TypeError:  # bases that C cannot combine
        return cast(type[BaseException], ErrorKind(name, (kinds[0],), members))


def rebuilt_error(kind: Any, parts: Sequence[Any], peer: Peer, number: int) -> BaseException:
    """Return an exception like one of the other side, from its parts; FrameError if it cannot be."""
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise values.FrameError("an exception of no class")
    args, text, own, cause, is_cause = parts
    base = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    try:
        error = kind.__new__(kind, *args)
        base.__init__(error, *args)  # type: ignore[misc]
    except (TypeError, ValueError):  # its class wants other arguments
        error = kind.__new__(kind)
    error.args = tuple(args)
    for name, value in own.items():
        if (name not in ("args", "__dict__") and not hasattr(type(error), name)) or name in FILE_NAMES:
            setattr(error, name, value)
    if not isinstance(kind, ErrorKind) and str(error) != text:
        error.args = (text,)
    vars(error).update(_retrain_number=number, _retrain_peer=peer, _retrain_text=str(text))
    if isinstance(cause, BaseException):
        setattr(error, "__cause__" if is_cause else "__context__", cause)
    return error


def parts_of(error: BaseException, encode: Callable[[Any], Any]) -> list[Any]:
    """Return the parts of an exception: arguments, text, attributes, cause, and whether it is one."""
    attributes = {
        str(name): value for name, value in vars(error).items() if name[:1] != "_" or name == "__notes__"
    }
    for name in FILE_NAMES:
        if isinstance(value := getattr(error, name, None), str):
            attributes.setdefault(name, value)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    chain, link = 0, cause
    while link is not None and chain <= LONGEST_CHAIN:
        chain, link = chain + 1, link.__cause__ or link.__context__
    encoded_cause = encode(cause) if chain <= LONGEST_CHAIN else None
    return [
        encode(error.args),
        str(error)[:2000],
        encode(attributes),
        encoded_cause,
        error.__cause__ is not None,
    ]
