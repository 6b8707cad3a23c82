"""Stand-ins for objects of another sandbox, which are never told what they are compared with."""

from __future__ import annotations

import copy
import importlib
import math
import operator
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.plugins.sandbox.inside.peer import Peer

DATA = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
FIXED = (int, float, complex, str, bytes, tuple, frozenset)  # data that no program changes
CONTAINER_VERBS = (
    "add append insert pop remove clear update extend get keys values items setdefault sort reverse copy"
)
DATA_METHODS = {name for kind in DATA for name in dir(kind)} - set(CONTAINER_VERBS.split())
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
    name: getattr(operator, name)
    for name in [*BINARY, *(f"i{one.strip('_')}" for one in BINARY), "neg", "pos", "abs", "invert"]
}
COMPUTING["divmod"] = divmod
REFLECTED = [*BINARY, "divmod"]
COPYING = {name: getattr(copy, name) for name in ("copy", "deepcopy")}


def _enter(manager: Any) -> Any:
    return type(manager).__enter__(manager)


def _leave(manager: Any, *error: Any) -> Any:
    return type(manager).__exit__(manager, *error)


def _run(coroutine: Any) -> Any:
    """Return what a coroutine returns, run in the only loop of this process."""
    if "loop" not in LOOP:
        LOOP["loop"] = importlib.import_module("asyncio").new_event_loop()  # seldom loaded
    return LOOP["loop"].run_until_complete(coroutine)


LOOP: dict[str, Any] = {}
ASYNCHRONOUS: dict[str, Callable[..., Any]] = {
    "anext": lambda x: _run(_answer_of(type(x).__anext__(x))),
    "aenter": lambda x: _run(_answer_of(type(x).__aenter__(x))),
    "aexit": lambda x, *error: _run(_answer_of(type(x).__aexit__(x, *error))),
}


async def _answer_of(awaitable: Any) -> Any:
    return await awaitable


OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **READING,
    **COMPARING,
    **COMPUTING,
    **COPYING,
    **ASYNCHRONOUS,
    "contains": operator.contains,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "delattr": delattr,
    "aiter": lambda x: type(x).__aiter__(x),
    "enter": _enter,
    "exit": _leave,
    "run": _run,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "callable": callable,
    "type": type,
    "defines": lambda x, name: getattr(type(x), name, None) is not getattr(object, name, None),
}
NO_METHODS = ("defines", "isinstance", "issubclass", "callable", "type", "run", *ASYNCHRONOUS)
# by which a library would read memory where the other side points
POINTERS = ("__array_", "__cuda_array_", "__dlpack_", "__buffer_", "_as_parameter_")


class StandIn:
    """An object of the other side."""

    __slots__ = ("__weakref__", "_compares", "_is_class", "_is_made", "_number", "_peer")

    def __init__(self, peer: Peer, number: int, role: str) -> None:
        """Stand for an object in a role.

        "class", or "made" by calling one; "kind" and "equal": the same, and tests may compare it with data.
        """
        parts = (
            role in ("kind", "equal"),
            role in ("class", "kind"),
            role in ("made", "equal"),
            number,
            peer,
        )
        for name, value in zip(StandIn.__slots__[1:], parts, strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._peer.call(self._number, args, kwargs, makes=self._is_class)
        if self._is_class and isinstance(made, StandIn):  # not the one that a function may return later
            return self._peer.stand_in(made._number, "equal" if self._compares else "made")
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith(POINTERS):
            raise AttributeError(name)
        (found,) = self._peer.ask("get", self._number, name)
        value = self._peer.reach(name, found)
        is_odd = self._peer.is_judge and not self._is_made and not self._is_class
        if is_odd and name in DATA_METHODS and callable(value):
            self._peer.suspect_method(self, name, found)
            raise AttributeError(f"what the program returned is an object, not data with a {name!r}")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._number, name, self._peer.encode(value))

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


class Visitor(StandIn):
    """An object of the tests, where the program is: there is nothing to protect."""

    __slots__ = ()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._peer.decode(*self._peer.ask("get", self._number, "__class__"))

    @property
    def __signature__(self) -> Any:
        inspect = importlib.import_module("inspect")  # seldom loaded
        parts = self._peer.decode(*self._peer.ask("get", self._number, "__signature__"))
        return inspect.Signature(
            [
                inspect.Parameter(name, kind, default=(*default, inspect.Parameter.empty)[0])
                for name, kind, default in parts
            ]
        )


def _compares(value: Any) -> bool:
    return isinstance(value, StandIn) and value._compares


def operate(name: str, *operands: Any) -> Any:
    """Let the other side compute, unless that would tell it what its result is compared with."""
    own = [operand for operand in operands if isinstance(operand, StandIn)]
    own = own or [one for one in operands if number_of(one) is not None]
    peer: Peer = own[0]._peer if isinstance(own[0], StandIn) else vars(own[0])["_retrain_peer"]
    is_made = any(isinstance(one, StandIn) and one._is_made for one in own)
    has_data = len(own) < len(operands) and (name in COMPARING or name in COMPUTING)
    may_compare = name not in COMPARING or any(map(_compares, own))
    if has_data and peer.is_judge and not (is_made and may_compare):
        peer.suspect(name, operands)
        if name in COMPARING and all(isinstance(one, StandIn) or type(one) in DATA for one in operands):
            return _differs(name)  # `NotImplemented` would be true
        return NotImplemented
    (found,) = peer.ask("op", name, [peer.encode(operand) for operand in operands])
    value = peer.decode(found)
    if is_made and name in COMPUTING and isinstance(value, StandIn):
        return peer.stand_in(value._number, "equal" if any(map(_compares, own)) else "made")
    return value


def _differs(name: str) -> bool:
    """Return how an object compares with data that it is not; raise TypeError if it has no order."""
    if name in ("eq", "ne"):
        return name == "ne"
    raise TypeError(f"{name!r} is not supported between what the program returned and data")


def _method(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    def method(self: StandIn, *others: Any) -> Any:
        return operate(name, *others, self) if reflected else operate(name, self, *others)

    return method


def _asynchronous(name: str) -> Callable[..., Any]:
    async def method(self: StandIn) -> Any:
        return operate(name, self)

    return method


async def awaited(coroutine: StandIn) -> Any:
    """Return what a coroutine of the other side returns, which runs there."""
    return operate("run", coroutine)


def _exited(self: StandIn, kind: Any, error: Any, trace: Any, name: str = "exit") -> bool:
    """Leave a context manager of the program, which may not hide a failure or skip an assertion."""
    has_swallowed = bool(operate(name, self, kind, error, None)) and error is not None
    return has_swallowed and (not self._peer.is_judge or self._peer.may_swallow(trace))


async def _exited_later(self: StandIn, kind: Any, error: Any, trace: Any) -> bool:
    return _exited(self, kind, error, trace, "aexit")


def _looped(self: StandIn) -> Any:
    if self._peer.asserts_in_async_loops:
        raise TypeError("a loop over an asynchronous generator of the program could skip its assertions")
    return operate("aiter", self)


def _holds(self: StandIn, value: Any) -> bool:
    if self._is_made or not self._peer.is_judge or isinstance(value, StandIn):
        return bool(operate("contains", self, value))
    return bool(self._peer.is_among(self, value))


def _copying(name: str) -> Callable[..., Any]:
    def copied(self: StandIn, *_: Any) -> Any:
        found = operate(name, self)
        is_made = self._is_made and isinstance(found, StandIn)
        role = "equal" if self._compares else "made"
        return self._peer.stand_in(found._number, role) if is_made else found

    return copied


def _length(self: StandIn) -> int:
    """Return the length of an object; a loop over one that the tests did not make could be shorter."""
    if self._peer.is_judge and self._peer.has_loops and not self._is_made and not self._is_class:
        self._peer.suspect_length(self)
        raise TypeError("what the program returned is an object, not data with a length")
    return int(operate("len", self))


def _hashed(self: StandIn) -> int:
    return int(operate("hash", self))


def _attribute(name: str) -> property:
    return property(lambda self: self.__getattr__(name))


for _name in OPERATIONS:
    if _name not in NO_METHODS:
        setattr(StandIn, f"__{_name.strip('_')}__", _method(_name))
for _name in REFLECTED:
    setattr(StandIn, f"__r{_name.strip('_')}__", _method(_name, reflected=True))
for _name in COPYING:
    setattr(StandIn, f"__{_name}__", _copying(_name))
for _name in ("anext", "aenter"):
    setattr(StandIn, f"__{_name}__", _asynchronous(_name))
for _name, _own in {
    "doc": _attribute("__doc__"),
    "module": _attribute("__module__"),
    "exit": _exited,
    "aexit": _exited_later,
    "aiter": _looped,
    "contains": _holds,
    "len": _length,
    "hash": _hashed,
}.items():
    setattr(StandIn, f"__{_name}__", _own)
Visitor.__doc__ = StandIn.__doc__  # the property


def number_of(value: Any) -> int | None:
    """Return the number of what stands for something on the other side."""
    try:
        number = value._number if isinstance(value, StandIn) else vars(value).get("_retrain_number")
    except TypeError:
        return None
    return number if isinstance(number, int) else None


def data_stand_in(data: Any, peer: Peer, number: int, name: str) -> Any:
    """Return data of a subclass, such as a named tuple; further attributes are asked for."""
    if type(data) not in DATA:
        return data

    def ask(_: Any, attribute: str) -> Any:
        if attribute.startswith(
            ("__", *POINTERS)
        ):  # data has those of its kind; numpy, copy and others ask for more
            raise AttributeError(attribute)
        (found,) = peer.ask("get", number, attribute)
        value = peer.decode(found)
        is_shape = attribute == "shape" and not isinstance(value, str | int | float)
        if is_shape or (attribute in ("ndim", "size") and "numpy" in sys.modules):
            raise AttributeError(f"{attribute}: of an array that it is not")
        return value

    held = peer.held.get(number)
    if isinstance(data, FIXED) and isinstance(held, type(data)) and held == data:
        return held  # so that `is` holds, as for a member of an IntEnum
    own: dict[str, Any] = {"__getattr__": ask}
    if isinstance(data, dict):  # of a class like Counter, which knows more keys than it has
        own["__missing__"] = lambda _, key: peer.decode(
            *peer.ask("op", "getitem", [["o", number], peer.encode(key)])
        )
    made = type(name, (type(data),), own)(data)
    vars(made).update(_retrain_number=number, _retrain_peer=peer)
    peer.held[number] = made
    return made
