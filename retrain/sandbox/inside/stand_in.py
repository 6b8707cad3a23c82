"""Stand-ins for objects of another sandbox, which are never told what they are compared with."""

from __future__ import annotations

import copy
import importlib
import operator
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.sandbox.inside.peer import Peer

DATA = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
FIXED = (int, float, complex, str, bytes)  # data that no program changes
CONTAINER_VERBS = (
    "add append insert pop remove clear update extend get keys values items setdefault sort reverse copy"
)
DATA_METHODS = {name for kind in DATA for name in dir(kind)} - set(CONTAINER_VERBS.split())
READING: dict[str, Callable[..., Any]] = {
    "len": len,
    "iter": iter,
    "next": next,
    "getitem": operator.getitem,
    "str": str,
    "repr": repr,
    "bool": bool,
    "hash": hash,
    "reversed": reversed,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
    "round": round,
    "format": format,
}
LOOKING: dict[str, Callable[..., Any]] = {**READING, "setitem": operator.setitem, "delitem": operator.delitem}
COMPARING = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
COMPUTING = {
    name: getattr(operator, name)
    for name in """add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift neg pos abs invert
    contains iadd isub imul""".split()
}
COMPUTING["divmod"] = divmod
COPYING = {name: getattr(copy, name) for name in ("copy", "deepcopy")}
OPERATIONS: Mapping[str, Callable[..., Any]] = {
    **LOOKING,
    **COMPARING,
    **COMPUTING,
    **COPYING,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "run": lambda coroutine: importlib.import_module("asyncio").run(coroutine),
    "enter": lambda x: type(x).__enter__(x),
    "exit": lambda x, *error: type(x).__exit__(x, *error),
}
FAILURES = (AssertionError, AttributeError, NameError, TypeError)  # of tests that meet a wrong result
# by which a library would read memory where the other side points
POINTERS = ("__array_", "__cuda_array_", "__dlpack_", "__buffer_", "_as_parameter_")
REFLECTED = "add sub mul truediv floordiv mod pow matmul and_ or_ xor divmod".split()


class StandIn:
    """An object of the other side."""

    __slots__ = ("_is_class", "_is_made", "_number", "_peer")

    def __init__(self, peer: Peer, number: int, *, is_class: bool = False, is_made: bool = False) -> None:
        for name, value in zip(self.__slots__, (is_class, is_made, number, peer), strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._peer.call(self._number, args, kwargs)
        if self._is_class and isinstance(made, StandIn):  # not the one that a function may return later
            return self._peer.stand_in(made._number, "made")
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith(POINTERS):
            raise AttributeError(name)
        (found,) = self._peer.ask("get", self._number, name)
        value = self._peer.reach(name, found)
        if callable(value) and name in DATA_METHODS and not self._is_made and not self._is_class:
            raise AttributeError(f"what the program returned is an object, not data with a {name!r}")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self._number, name, self._peer.encode(value))

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        """Refuse to be subclassed: methods of the tests would have to run beside the program's."""
        self._peer.needs_sharing = True
        raise TypeError("a class of the program cannot be subclassed by tests without shared = true")

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, StandIn) and _operate("isinstance", instance, self) is True

    def __subclasscheck__(self, other: Any) -> bool:
        return isinstance(other, StandIn) and _operate("issubclass", other, self) is True


def _operate(name: str, *operands: Any) -> Any:
    """Let the other side compute, unless that would tell it what its result is compared with."""
    own = [operand for operand in operands if isinstance(operand, StandIn)]
    data = len(own) < len(operands)
    if data and (name in COMPARING or (name in COMPUTING and not any(one._is_made for one in own))):
        return False if name == "contains" else NotImplemented
    (found,) = own[0]._peer.ask("op", name, [own[0]._peer.encode(operand) for operand in operands])
    return own[0]._peer.decode(found)


def _method(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    def method(self: StandIn, *others: Any) -> Any:
        return _operate(name, *others, self) if reflected else _operate(name, self, *others)

    return method


async def awaited(coroutine: StandIn) -> Any:
    """Return what a coroutine of the other side returns, which runs there."""
    return _operate("run", coroutine)


def _exited(self: StandIn, kind: Any, error: Any, trace: Any) -> bool:
    """Leave a context manager of the program, which may not hide a failure or skip an assertion."""
    has_swallowed = bool(_operate("exit", self, kind, error, trace)) and error is not None
    return has_swallowed and not isinstance(error, FAILURES) and trace.tb_lineno not in self._peer.asserting


def _copying(name: str) -> Callable[..., Any]:
    def copied(self: StandIn, *_: Any) -> Any:
        found = _operate(name, self)
        is_made = self._is_made and isinstance(found, StandIn)
        return self._peer.stand_in(found._number, "made") if is_made else found

    return copied


def _length(self: StandIn) -> int:
    """Return the length of an object that the tests made; a loop over another could be shorter."""
    if not self._is_made and not self._is_class:
        raise TypeError("what the program returned is an object, not data with a length")
    return int(_operate("len", self))


def _hashed(self: StandIn) -> int:
    return int(_operate("hash", self))


for _name in OPERATIONS:
    if _name not in ("isinstance", "issubclass", "run"):
        setattr(StandIn, f"__{_name.strip('_')}__", _method(_name))
for _name in REFLECTED:
    setattr(StandIn, f"__r{_name.strip('_')}__", _method(_name, reflected=True))
for _name in COPYING:
    setattr(StandIn, f"__{_name}__", _copying(_name))
StandIn.__doc__ = property(lambda self: self.__getattr__("__doc__"))  # type: ignore[assignment]
StandIn.__exit__ = _exited  # type: ignore[attr-defined]
StandIn.__len__ = _length  # type: ignore[attr-defined]
StandIn.__hash__ = _hashed  # type: ignore[method-assign, assignment]


def number_of(value: Any) -> int | None:
    """Return the number of a stand-in."""
    found = value._number if isinstance(value, StandIn) else getattr(type(value), "_retrain_number", None)
    return found if isinstance(found, int) else None


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
    if type(data) in FIXED and isinstance(held, type(data)) and held == data:
        return held  # so that `is` holds, as for a member of an IntEnum
    made = type(name, (type(data),), {"__getattr__": ask, "_retrain_number": number})(data)
    peer.held[number] = made
    return made
