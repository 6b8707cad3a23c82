"""Calls between tests and the program that they test, each in a sandbox of its own.

Data is copied. Functions, classes and other objects stay where they are: the other side gets stand-ins for
them. What a program returns never runs code of its own where the tests are, and is never told a value that
it is compared with: a stand-in is equal to no data, and only an object that the tests made themselves, by
calling a class by a name like `Vector`, takes part in arithmetic with data.
"""

from __future__ import annotations

import builtins
import io
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

from retrain.sandbox.inside import confine, values
from retrain.sandbox.inside.stand_in import (
    DATA,
    OPERATIONS,
    READING,
    StandIn,
    awaited,
    data_stand_in,
    number_of,
)

LONGEST_CHAIN = 20


class ExitError(SystemExit):
    """The program's own `SystemExit`, which is no end of the tests."""


class BrokenError(BaseException):
    """The other side has ended or sent what is no answer; tests must not catch it."""


class Peer:
    """One end of a conversation: the program's, with its names, or the tests', which serves little."""

    def __init__(self, reads: int, writes: int, names: Mapping[str, Any] | None = None) -> None:
        self._reads, self._writes, self._names = reads, writes, names
        self._exported: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._stand_ins: dict[tuple[int, str], StandIn] = {}  # by number and role
        self.held: dict[int, Any] = {}  # data of subclasses, by number
        self._errors: dict[tuple[str, ...], type[BaseException]] = {}
        self._turn = threading.RLock()  # a thread's until it has its answer
        self.has_ended = self.used = False
        self._printed = io.StringIO()  # by the program, since the last answer
        self.garbage = ""
        self.needs_sharing = False  # tests subclass a class of the program
        self.refused: tuple[type[BaseException], ...] = ()  # what no call may raise, as a loop would end
        self._changing: dict[int, Any] = {}
        self.asserting: set[int] = set()  # lines of the tests in a `with` block that asserts something

    def serve(self) -> None:
        """Answer requests until the other side ends."""
        sys.stdout = self._printed
        while True:
            try:
                request = values.read_frame(self._reads)
            except EOFError:
                return
            self._answer(request)

    def ask(self, *request: Any) -> Any:
        """Send a request, and return its result or raise its exception.

        Raises:
            BrokenError: there is no answer.
        """
        self.used |= request[0] != "name"
        try:
            with self._turn:
                kind, rest = self._exchanged(*request)
            if kind == "=":
                return rest
            error = self._error(*rest)
        except (EOFError, OSError):
            self.has_ended = True
            raise BrokenError("the program has ended") from None
        except (values.FrameError, ValueError, TypeError, LookupError) as problem:
            self.garbage = f"{problem}"[:200]
            raise BrokenError(self.garbage) from None
        is_end = request[:2] == ("op", "next") and isinstance(error, StopIteration | StopAsyncIteration)
        if isinstance(error, self.refused) and not is_end:
            raise RuntimeError(f"a call of the program raised {type(error).__name__}") from error
        raise error

    def _exchanged(self, *request: Any) -> tuple[Any, Any]:
        """Send a request; return the kind of its answer, "=" or "!", and the answer."""
        values.write_frame(self._writes, [request[0], "", *request[1:]])
        while True:
            kind, printed, *rest = values.read_frame(self._reads)
            if printed:
                sys.stdout.write(str(printed))
            if kind in ("=", "!"):
                return kind, rest
            self._answer([kind, "", *rest])

    def name(self, name: str) -> Any:
        """Return what a program calls by a name; raise AttributeError if that is nothing."""
        (found,) = self.ask("name", name)
        if not found:
            raise AttributeError(name)
        # what is only imported is not used; calls of a class of Python's are not seen
        self.used |= not callable(value := self.reach(name, found[0])) or value in values.CLASSES.values()
        return value

    def reach(self, name: str, message: Any) -> Any:
        """Return what has a name; a class makes objects only if tests call it by a name like a class's.

        Otherwise a program could call its class like the function that tests expect, and its result would
        take part in `abs(f(2) - wanted) < 1e-6`.
        """
        found = self.decode(message)
        if isinstance(found, StandIn) and name[:1].isupper() and message[2:] == ["class"]:
            return self.stand_in(found._number, "class")
        return found

    def stand_in(self, number: int, role: str = "object") -> StandIn:
        """Return the stand-in for an object in a role, "class" or "made" by the tests: the same each time."""
        if (key := (number, role)) not in self._stand_ins:
            self._stand_ins[key] = StandIn(self, number, is_class=role == "class", is_made=role == "made")
        return self._stand_ins[key]

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of the other side; if it returns None, arguments that it changed are changed here.

        One that returns something changes only those that `may_change`: otherwise it could also change what
        its result is compared with.
        """
        given = [self.encode(args), self.encode(kwargs)]
        result, changed = self.ask("call", number, *given)
        found = self.decode(result)
        if changed is not None:
            mine = [one if found is None or id(one) in self._changing else None for one in args]
            named = {key: one for key, one in kwargs.items() if found is None or id(one) in self._changing}
            values.merged([tuple(mine), named], [self.decode(part) for part in changed])
        return found

    def may_change(self, value: Any) -> Any:
        """Return an argument that functions may change in place, whatever they return."""
        self._changing[id(value)] = value
        return value

    def encode(self, value: Any) -> Any:
        return values.encode(value, self._export)

    def decode(self, message: Any) -> Any:
        """Return the value that JSON stands for.

        Raises:
            BrokenError: it stands for none.
        """
        try:
            return values.decode(message, self._load)
        except (values.FrameError, ImportError, ArithmeticError) as problem:
            self.garbage = f"{problem}"[:200]
            raise BrokenError(self.garbage) from None

    def _answer(self, request: list[Any]) -> None:
        try:
            reply = ["=", *REQUESTS[request[0]](self, *request[2:])]
        except BrokenError:
            raise
        except BaseException as error:  # noqa: BLE001 - it is the other side's to handle
            confine.tell_of_limits(error)
            reply = ["!", *self._told(error)]
        printed = self._printed.getvalue()
        self._printed.seek(0)
        self._printed.truncate()
        values.write_frame(self._writes, [reply[0], printed, *reply[1:]])

    def _name(self, name: str) -> tuple[Any, ...]:
        names = self._names or {}  # tests have none
        return ([self.encode(names[name])] if name in names else [],)

    def _operate(self, name: str, operands: Any) -> tuple[Any, ...]:
        if self._names is None and name not in READING:
            raise TypeError(f"not supported on an object of the tests: {name}")
        return (self.encode(OPERATIONS[name](*map(self.decode, operands))),)

    def _get(self, number: int, name: str) -> tuple[Any, ...]:
        return (self.encode(getattr(self._opened(number, name), name)),)

    def _set(self, number: int, name: str, value: Any) -> tuple[Any, ...]:
        target = self._opened(number, name)
        if self._names is None and callable(getattr(type(target), name, None)):
            raise AttributeError(f"a method of the tests cannot be replaced: {name}")
        setattr(target, name, self.decode(value))
        return (None,)

    def _opened(self, number: int, name: str) -> Any:
        """Return an object whose attribute the other side may reach."""
        target = self._exported[number]
        if self._names is None and (name.startswith("_") or type(target).__module__ != "__main__"):
            raise AttributeError(name)
        return target

    def _call(self, number: int, args: Any, kwargs: Any) -> tuple[Any, ...]:
        given = [self.decode(args), self.decode(kwargs)]
        result = self.encode(self._exported[number](*given[0], **given[1]))
        after, named = (self.encode(part)[1] for part in given)
        if [after, named] == [args[1], kwargs[1]]:
            return result, None
        # only what was changed: one list may be two arguments
        left = [None if new == old else new for old, new in zip(args[1], after, strict=True)]
        return result, [["t", left], ["d", [pair for pair in named if pair not in kwargs[1]]]]

    def _export(self, value: Any) -> Any:
        if (number := number_of(value)) is not None:
            return ["o", number]
        if isinstance(value, types.ModuleType):
            return ["m", value.__name__]
        if known := values.parts_of(value):
            return ["k", known[0], self.encode(known[1])]
        kind = type(value)
        if kind.__module__ == "numpy" and hasattr(value, "item") and kind.__name__ != "ndarray":
            return self.encode(value.item())
        number = self._numbers.setdefault(id(value), len(self._exported))
        if number == len(self._exported):
            self._exported.append(value)
        return self._stays(value, number)

    def _stays(self, value: Any, number: int) -> list[Any]:
        """Return what the other side gets for a value that stays here."""
        if base := next((base for base in DATA if isinstance(value, base)), None):
            return ["x", self.encode(values.plain(base, value)), number, type(value).__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["e", _chain(value)]
        if isinstance(value, types.CoroutineType):
            return ["h", number, "coroutine"]
        return ["h", number, "class" if isinstance(value, type) else "object"]

    def _load(self, message: list[Any]) -> Any:
        match message:
            case ["h", int(number), role]:
                return self._loaded(number, role)
            case ["o", number]:
                return self._exported[number]
            case ["x", data, number, name]:
                return data_stand_in(self.decode(data), self, int(number), str(name))
            case ["e", names]:
                return self._error_class(tuple(map(str, names)))
            case ["k", known, parts] if known in values.KNOWN:
                return values.made_from(known, self.decode(parts))
            case ["m", str(name)]:
                return values.module(name)
        raise values.FrameError(f"a value of unknown kind {message[0]!r:.40}")

    def _loaded(self, number: int, role: str) -> Any:  # the program has nothing to protect
        found = self.stand_in(number, "object" if self._names is None else "made")
        return awaited(found) if role == "coroutine" else found

    def _told(self, error: BaseException) -> tuple[list[str], Any, str, Any]:
        try:
            own = {str(name): value for name, value in vars(error).items() if not name.startswith("_")}
            return _chain(type(error)), self.encode(error.args), str(error)[:2000], self.encode(own)
        except Exception:  # noqa: BLE001 - the program's own __str__
            return _chain(type(error)), ["t", []], "", ["d", []]

    def _error(self, names: list[str], args: Any, text: str, own: Any) -> BaseException:
        kind = self._error_class(tuple(map(str, names)))
        try:
            error = kind(*self.decode(args))
        except TypeError:  # its class wants other arguments
            error = kind.__new__(kind)
        if str(error) != text:
            error.args = (text,)
        vars(error).update({name: one for name, one in self.decode(own).items() if not hasattr(kind, name)})
        return error

    def _error_class(self, names: tuple[str, ...]) -> type[BaseException]:
        if not 0 < len(names) <= LONGEST_CHAIN:
            raise values.FrameError("an exception of no class")
        is_group = "BaseExceptionGroup" in names  # whose exceptions stay on the other side
        found = None if is_group else getattr(builtins, names[0], None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return ExitError if found is SystemExit else found
        if names not in self._errors:
            self._errors[names] = type(names[0], (self._error_class(names[1:]),), {})
        return self._errors[names]


REQUESTS: dict[str, Callable[..., tuple[Any, ...]]] = {  # what the other side may ask for
    "call": Peer._call,
    "name": Peer._name,
    "op": Peer._operate,
    "get": Peer._get,
    "set": Peer._set,
}


def _chain(kind: type[BaseException]) -> list[str]:
    return [base.__name__ for base in kind.__mro__ if issubclass(base, BaseException)][:LONGEST_CHAIN]
