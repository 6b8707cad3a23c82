"""Calls between tests and the program that they test, each in a sandbox of its own.

Data is copied. Functions, classes and other objects stay where they are: the other side gets stand-ins for
them. What a program returns never runs code of its own where the tests are, and is never told a value that
it is compared with: a stand-in is equal to no data, and only an object that the tests made themselves, by
calling a class that they use as one, takes part in comparisons and arithmetic with data.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import itertools
import os
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrain.plugins.sandbox.inside import confine, values
from retrain.plugins.sandbox.inside.errors import ExitError, rebuilt_class, rebuilt_error, told
from retrain.plugins.sandbox.inside.replicas import LONGEST, Replicas
from retrain.plugins.sandbox.inside.stand_in import (
    COMPARING,
    DATA,
    OPERATIONS,
    READING,
    StandIn,
    Visitor,
    awaited,
    data_stand_in,
    number_of,
    operate,
)

MOST_ITEMS = 1000  # of an object of the program, in which the tests look for something
OF_NAMED_TUPLES = ("_asdict", "_fields", "_make", "_replace")
OPEN_NAMES = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "__class__")


class BrokenError(BaseException):
    """The other side has ended or sent what is no answer; tests must not catch it."""


@dataclass
class Identities:
    """What becomes of data with an identity while it is encoded or decoded."""

    places: dict[int, int] = field(default_factory=dict)  # among arguments, by identity
    given: list[Any] = field(default_factory=list)  # arguments, by their places
    taken: list[Any] | None = None  # arguments that are decoded
    registers: bool = False  # arguments are encoded
    lends: bool = False  # an object here holds what is encoded
    skips: Any = None  # the next one, whose content is wanted


NO_IDENTITIES = Identities()


class Peer:
    """One end of a conversation: the program's, with its names, or the tests', which serves little."""

    def __init__(self, reads: int, writes: int, names: dict[str, Any] | None = None) -> None:
        self._frames, self._writes, self._names = values.Frames(reads), writes, names
        self.is_judge = names is None
        self._exported: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._stand_ins: dict[tuple[int, str], StandIn] = {}  # by number and role
        self.held: dict[int, Any] = {}  # data of subclasses and exceptions, by number
        self._kinds: dict[int, type[BaseException]] = {}  # classes of exceptions, by number
        self._turn = threading.RLock()  # a thread's until it has its answer
        self.has_ended = self.used = False
        self._printed = io.StringIO()  # by the program, since the last answer
        self._warned: list[Any] = []
        self.garbage = ""
        self.doubt = ""  # why tests may fail by what this cannot do
        self.has_numpy_numbers = False
        self.hides_changes = False  # of arguments, by functions that return something
        self.needs_sharing = False  # tests subclass a class of the program
        self.refused: tuple[type[BaseException], ...] = ()  # what no call may raise, as a loop would end
        self._changing: dict[int, Any] = {}
        self.changes_all = False
        self.swallows: set[int] = set()  # lines of the tests that skip nothing if they end a `with` block
        self.unchecked: set[int] = set()  # lines of `with` blocks that check nothing
        self.classes: frozenset[str] = frozenset()  # names that tests use as those of classes
        self.has_loops = self.asserts_in_async_loops = False
        self._replicas = Replicas()
        self._in_thread = threading.local()
        self.copies: dict[int, tuple[Any, Any]] = {}  # of arguments that a function changed, and returned

    def serve(self) -> None:
        """Answer requests until the other side ends."""
        sys.stdout = self._printed
        setattr(warnings, "showwarning", self._note_warning)  # noqa: B010 - as warnings documents it
        warnings.simplefilter("always")
        while True:
            try:
                request = self._read()
            except EOFError:
                return
            self._answer(request)

    def ask(self, *request: Any) -> Any:
        """Send a request, and return its result or raise its exception.

        Raises:
            BrokenError: there is no answer.
        """
        self.used |= request[0] not in ("name", "define", "library")
        try:
            with self._turn:
                kind, rest = self._exchanged(*request)
            if kind == "=":
                return rest
            if kind == "~":
                self.doubt = str(rest[0])[:200]
                raise BrokenError(self.doubt)
            error = self.decode(rest[0])
            if not isinstance(error, BaseException):
                raise values.FrameError("an exception that is none")
        except (EOFError, OSError):
            self.has_ended = True
            raise BrokenError("the program has ended") from None
        except (values.FrameError, ValueError, TypeError, LookupError) as problem:
            self.garbage = f"{problem}"[:200]
            raise BrokenError(self.garbage) from None
        is_step = request[0] == "op" and request[1] in ("next", "anext")
        is_end = is_step and isinstance(error, StopIteration | StopAsyncIteration)
        if isinstance(error, self.refused) and not is_end:
            raise RuntimeError(f"a call of the program raised {type(error).__name__}") from error
        raise error

    def _exchanged(self, *request: Any) -> tuple[Any, Any]:
        """Send a request; return the kind of its answer, "=", "!" or "~", and the answer."""
        self._send(*request)
        while True:
            kind, *rest = self._read()
            if kind in ("=", "!", "~"):
                return kind, rest
            self._answer([kind, *rest])

    def _send(self, kind: str, *content: Any) -> None:
        """Write a message, with what was printed and changed since the last one.

        Raises:
            FrameError: what was changed cannot be sent.
        """
        notes: Any = ""
        if changes := self._replicas.changes(self._content):
            notes = ["", changes, []]
        if self._warned or self._printed.tell():
            notes = [self._printed.getvalue(), changes, self._warned]
            self._warned = []
            self._printed.seek(0)
            self._printed.truncate()
        frame = values.frame([kind, notes, *content])
        if len(frame) > values.LONGEST_FRAME:
            self.doubt = f"a value of {len(frame) >> 20} MB is too large to be handed over"
            if self.is_judge:
                raise BrokenError(self.doubt)
            frame = values.frame(["~", "", self.doubt])
        values.write(self._writes, frame)

    def _read(self) -> list[Any]:
        """Return the next message, without its notes, which are followed."""
        kind, notes, *content = self._frames.read()
        if isinstance(notes, list):
            printed, changes, warned = notes
            if printed:
                sys.stdout.write(str(printed))
            self._replicas.change(changes, self.decode)
            for kind_of_warning, text in warned:
                category = self.decode(kind_of_warning)
                if isinstance(category, type) and issubclass(category, Warning):
                    warnings.warn(str(text), category, stacklevel=5)
        elif notes:
            sys.stdout.write(str(notes))
        return [kind, *content]

    def _note_warning(self, message: Any, category: type[Warning], *_: Any) -> None:
        self._warned.append([self.encode(category), str(message)[:2000]])

    def _content(self, container: Any) -> Any:
        """Return the message of the content of data with an identity."""
        content = values.content_of(container)
        with self._encoding(places=self._identities.places, skips=content):
            return self.encode(content)

    @contextlib.contextmanager
    def _encoding(self, **how: Any) -> Iterator[None]:
        """Treat data with an identity in another way for a while."""
        before = self._identities
        self._in_thread.identities = Identities(**how)
        try:
            yield
        finally:
            self._in_thread.identities = before

    @property
    def _identities(self) -> Identities:
        found: Identities = getattr(self._in_thread, "identities", NO_IDENTITIES)
        return found

    def name(self, name: str) -> Any:
        """Return what a program calls by a name; raise AttributeError if that is nothing."""
        (found,) = self.ask("name", name)
        if not found:
            raise AttributeError(name)
        # what is only imported is not used; calls of a class of Python's are not seen
        self.used |= not callable(value := self.reach(name, found[0])) or type(value) is type
        return value

    def reach(self, name: str, message: Any) -> Any:
        """Return what has a name; a class makes objects of the tests only if they use it as one.

        Otherwise a program could call its class like the function that tests expect, and its result would
        take part in `abs(f(2) - wanted) < 1e-6`.
        """
        found = self.decode(message)
        if self.is_judge and not name.startswith("_") and (kinds := _hiding(found)):
            if AssertionError not in kinds:  # where a program names `Exception` anew
                self.doubt = self.doubt or f"{name} of the program is a class that catches failed assertions"
            return type(name, (Exception,), {})
        if isinstance(found, StandIn) and name[:1].isupper() and message[2:] == ["class"]:
            return self.stand_in(found._number, "kind" if name in self.classes else "class")
        return found

    def stand_in(self, number: int, role: str = "object") -> StandIn:
        """Return the stand-in for an object in a role, "class" or "made" by the tests: the same each time."""
        if (key := (number, role)) not in self._stand_ins:
            kind = StandIn if self.is_judge else Visitor
            self._stand_ins[key] = kind(self, number, role)
        return self._stand_ins[key]

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, makes: bool = False) -> Any:
        """Call a function of the other side; if it returns None, arguments that it changed are changed here.

        One that returns something changes only those that `may_change`: otherwise it could also change what
        its result is compared with.
        """
        with self._turn:
            given: list[Any] = []
            allowed: set[int] = set()
            messages = []
            with self._encoding(given=given, registers=True):
                for one in (*args, *kwargs.values()):
                    first = len(given)
                    messages.append(self.encode(one))
                    if id(one) in self._changing:
                        allowed.update(range(first, len(given)))
            count = len(args)
            named = [[key, message] for key, message in zip(kwargs, messages[count:], strict=True)]
            result, *changed = self.ask("make" if makes else "call", number, messages[:count], named)
            changes = (changed[0] if changed else None) or []
            try:
                return self._returned(result, changes, given, allowed)
            except (values.FrameError, ValueError, TypeError, LookupError, AttributeError) as problem:
                self.garbage = f"{problem}"[:200]
                raise BrokenError(self.garbage) from None

    def _returned(self, result: Any, changes: Sequence[Any], given: list[Any], allowed: set[int]) -> Any:
        """Return the result of a call that has changed some of what it was given."""
        if not changes:
            return self._decoded(result, given)
        seen = list(given)
        if result is not None and not self.changes_all:
            hidden = [place for place, _ in changes if place not in allowed]
            for place in hidden:
                seen[place] = copy.copy(given[place])
                self.copies[id(seen[place])] = (seen[place], given[place])
            self.hides_changes |= bool(hidden)
        contents = [(place, self._decoded(content, seen)) for place, content in changes]
        for place, content in contents:
            values.fill(seen[place], content)
        return self._decoded(result, seen)

    def _decoded(self, message: Any, given: list[Any]) -> Any:
        with self._encoding(given=given):
            return values.decode(message, self._load)

    def may_change(self, value: Any) -> Any:
        """Return an argument that functions may change in place, whatever they return."""
        self._changing[id(value)] = value
        return value

    def is_same(self, one: Any, other: Any) -> bool:
        """Whether two values are one object, here or on the other side."""
        one, other = (self.copies.get(id(value), (value, value))[1] for value in (one, other))
        number = number_of(one)
        return one is other or (number is not None and number == number_of(other))

    def encode(self, value: Any) -> Any:
        """Return a value as JSON.

        Raises:
            FrameError: the program cannot hand it over.
            BrokenError: the tests cannot.
        """
        try:
            return values.encode(value, self._export, self._refer)
        except values.FrameError as problem:
            if self.is_judge:
                self.doubt = str(problem)
                raise BrokenError(self.doubt) from None
            raise

    def lend(self, value: Any) -> Any:
        """Return the message of data that an object here holds, so that changes of it are seen here."""
        with self._encoding(lends=True):
            return self.encode(value)

    def decode(self, message: Any) -> Any:
        """Return the value that JSON stands for.

        Raises:
            BrokenError: it stands for none.
        """
        try:
            return values.decode(message, self._load, self._identities.taken)
        except (values.FrameError, ImportError, ArithmeticError) as problem:
            self.garbage = f"{problem}"[:200]
            raise BrokenError(self.garbage) from None

    def suspect(self, name: str, operands: Sequence[Any]) -> None:
        """Note that plain Python may accept an operator of the program on data, unless it takes anything.

        The program is asked about other data of the same kind, never about that of the tests.
        """
        if self.doubt:
            return
        data = next(one for one in operands if number_of(one) is None)
        found = []
        owner = next(one for one in operands if number_of(one) is not None)
        try:
            if name in COMPARING and not operate("defines", owner, f"__{name}__"):
                return
            for decoy in _decoys(data):
                given = [decoy if one is data else one for one in operands]
                found.append(self.decode(*self.ask("op", name, [self.encode(one) for one in given])))
            is_honest = (
                found == [name == "ne"] * 2
                if name in ("eq", "ne", "contains")
                else bool(found[0] != found[1])
            )
        except Exception:  # noqa: BLE001 - the program's own; plain Python would meet one as well
            return
        if is_honest:
            self.doubt = "the tests let an object of the program decide how it compares with data"

    def suspect_method(self, owner: StandIn, name: str, message: Any) -> None:
        """Note that plain Python may accept a method named like one of data, unless there is any method."""
        if isinstance(message, list) and message[0] == "h" and message[2] == "object":
            try:
                self.ask("get", owner._number, f"a{_random.getrandbits(40):x}")
            except AttributeError:
                self.doubt = self.doubt or f"the tests call {name!r} of an object that a function returned"
            except Exception:  # noqa: BLE001 - the program's own
                return

    def suspect_length(self, value: StandIn) -> None:
        """Note that plain Python may accept the length of an object, unless a loop over it is shorter."""
        try:
            length = self.ask("op", "len", [["o", value._number]])[0]
            count = (
                sum(1 for _ in itertools.islice(value, MOST_ITEMS + 1))
                if self._is_iterable(value)
                else length
            )
        except Exception:  # noqa: BLE001 - the program's own
            return
        if length == count:
            self.doubt = self.doubt or "the tests ask for the length of an object that a function returned"

    def _is_iterable(self, value: StandIn) -> bool:
        try:
            return bool(iter(value)) or True
        except TypeError:
            return False

    def is_among(self, container: StandIn, value: Any) -> bool:
        """Whether data is among what an object of the program holds, as a loop of the tests finds it."""
        try:
            items = iter(container)
        except TypeError:
            self.suspect("contains", (container, value))
            return False
        found = list(itertools.islice(items, MOST_ITEMS + 1))  # a generator may have no end
        return len(found) <= MOST_ITEMS and value in found

    def may_swallow(self, trace: Any) -> bool:
        """Whether a context manager of the program may end a block of the tests by an error there."""
        if trace is None or trace.tb_frame.f_code.co_filename != "tests.py":
            return False
        if trace.tb_lineno in self.unchecked and trace.tb_lineno not in self.swallows:
            self.doubt = self.doubt or "a context manager of the program ends a block of the tests"
        return trace.tb_lineno in self.swallows

    def type_of(self, value: Any) -> Any:
        """Return the class of a value, wherever it is."""
        if number_of(value) is None or isinstance(value, type | BaseException):
            return type(value)
        found = operate("type", value)
        return self.stand_in(found._number, "class") if isinstance(found, StandIn) else found

    def is_instance(self, value: Any, kinds: Any) -> bool:
        """Whether a value, wherever it is, is of a class, of Python's as well."""
        if isinstance(kinds, tuple):
            return any(self.is_instance(value, kind) for kind in kinds)
        is_theirs = isinstance(value, StandIn) and isinstance(kinds, type) and kinds.__module__ != "__main__"
        if is_theirs and (value._is_made or kinds not in (*DATA, bool)):
            return operate("isinstance", value, kinds) is True
        return isinstance(value, kinds)

    def is_subclass(self, kind: Any, kinds: Any) -> bool:
        """Whether a class, wherever it is, is one of another, of Python's as well."""
        if isinstance(kinds, tuple):
            return any(self.is_subclass(kind, one) for one in kinds)
        is_theirs = isinstance(kind, StandIn) and isinstance(kinds, type) and kinds.__module__ != "__main__"
        return operate("issubclass", kind, kinds) is True if is_theirs else issubclass(kind, kinds)

    def library(self, place: str, name: str, args: Any, kwargs: Any) -> Any:
        """Return what a function of the library says of an object of the program."""
        return self.decode(*self.ask("library", place, name, self.encode(args), self.encode(kwargs)))

    def _answer(self, request: list[Any]) -> None:
        try:
            reply: list[Any] = ["=", *REQUESTS[request[0]](self, *request[1:])]
        except BrokenError:
            raise
        except values.FrameError as problem:
            reply = ["~", str(problem)]
        except BaseException as error:  # noqa: BLE001 - it is the other side's to handle
            confine.tell_of_limits(error)
            reply = ["!", self._told(error)]
        self._send(*reply)

    def _told(self, error: BaseException) -> Any:
        try:
            return self.encode(error)
        except Exception:  # noqa: BLE001 - the program's own __str__, or a value that cannot be handed over
            return ["E", self._number(error), self.encode(type(error)), ["t", []], "", ["d", []], None, False]

    def _name(self, name: str) -> tuple[Any, ...]:
        names = self._names or {}  # tests have none
        return ([self.lend(names[name])] if name in names else [],)

    def _define(self, name: str, value: Any) -> tuple[Any, ...]:
        if self._names is not None:
            self._names.setdefault(name, self.decode(value))
        return (None,)

    def _operate(self, name: str, operands: Any) -> tuple[Any, ...]:
        given = [*map(self.decode, operands)]
        is_identity = name in ("eq", "ne") and all(
            isinstance(one, list) and one[0] == "o" for one in operands
        )
        if self.is_judge and name not in READING and not is_identity and not any(map(_is_of_tests, given)):
            raise TypeError(f"not supported on an object of the tests: {name}")
        if name == "delattr":
            self._check_change(*given)
        result = OPERATIONS[name](*given)
        return (self.lend(result) if name in ("getitem", "enter", "aenter") else self.encode(result),)

    def _library(self, place: str, name: str, args: Any, kwargs: Any) -> tuple[Any, ...]:
        if self.is_judge:
            raise TypeError(f"not supported: {place}.{name}")
        function = getattr(importlib.import_module(place), name)
        return (self.encode(function(*self.decode(args), **self.decode(kwargs))),)

    def _get(self, number: int, name: str) -> tuple[Any, ...]:
        if self.is_judge and name == "__signature__":
            return (self.encode(_signature(self._exported[number])),)
        return (self.lend(getattr(self._opened(number, name), name)),)

    def _set(self, number: int, name: str, value: Any) -> tuple[Any, ...]:
        target = self._opened(number, name)
        self._check_change(target, name)
        setattr(target, name, self.decode(value))
        return (None,)

    def _check_change(self, target: Any, name: str) -> None:
        """Raise AttributeError if that attribute of an object is a method of the tests."""
        if self.is_judge and (not _is_of_tests(target) or callable(getattr(_class_of(target), name, None))):
            raise AttributeError(f"a method of the tests cannot be replaced: {name}")

    def _opened(self, number: int, name: str) -> Any:
        """Return an object whose attribute the other side may reach."""
        target = self._exported[number]
        if not self.is_judge:
            return target
        is_open = _is_of_tests(target) or _is_open(target, name)
        is_named = name in OPEN_NAMES and (
            _is_of_tests(target) or isinstance(target, types.FunctionType | type)
        )
        is_public = not name.startswith("_") or (isinstance(target, tuple) and name in OF_NAMED_TUPLES)
        if is_named or (is_open and is_public):
            return target
        raise AttributeError(name)

    def _call(self, number: int, args: Any, kwargs: Any) -> tuple[Any, ...]:
        positional, named, taken = self._taken(args, kwargs)
        contents = [*map(values.content_of, taken)]
        result = self._exported[number](*positional, **named)
        is_held = sys.getrefcount(result) > _FRESH
        places = {id(one): place for place, one in enumerate(taken)}
        with self._encoding(places=places, lends=is_held):
            message = self.encode(result)
        with self._encoding(places=places):
            changes = [
                [place, self._content(one)]
                for place, (one, content) in enumerate(zip(taken, contents, strict=True))
                if not values.has_content(one, content)
            ]
        return message, changes or None

    def _make(self, number: int, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Make an object of a class, which stays here even if it is data of a kind with an identity."""
        positional, named, _ = self._taken(args, kwargs)
        made = self._exported[number](*positional, **named)
        if isinstance(made, tuple(values.CHANGEABLE)) and type(made) not in values.CHANGEABLE:
            return (["h", self._number(made), "object"],)
        return (self.encode(made),)

    def _taken(self, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any], list[Any]]:
        """Return arguments, and all data with an identity in them."""
        taken: list[Any] = []
        with self._encoding(given=taken, taken=taken):
            positional = [*map(self.decode, args)]
            named = {key: self.decode(one) for key, one in kwargs}
        return positional, named, taken

    def _refer(self, value: Any) -> Any:
        """Return what stands for data with an identity, which the other side has or is to have as well."""
        how = self._identities
        if value is how.skips:
            how.skips = None
            return None
        if (known := self._replicas.place_of(value)) is not None:
            is_mine, number = known
            return ["r" if is_mine else "o", number]
        if (place := how.places.get(id(value))) is not None:
            return ["g", place]
        if how.registers:
            how.places[id(value)] = len(how.given)
            how.given.append(value)
        elif how.lends and len(value) <= LONGEST:
            number = self._number(value)
            self._replicas.add(value, number, is_mine=True)
            with self._encoding(lends=True, skips=value):
                return ["r", number, self.encode(value)]
        return None

    def _number(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._exported))
        if number == len(self._exported):
            self._exported.append(value)
        return number

    def _export(self, value: Any) -> Any:
        if (number := number_of(value)) is not None:
            return ["o", number]
        if isinstance(value, types.ModuleType):
            return ["m", value.__name__]
        if isinstance(value, type):
            return self._exported_class(value)
        if isinstance(value, BaseException):
            with self._encoding():
                return ["E", self._number(value), self.encode(type(value)), *told(value, self.encode)]
        if known := values.parts_of(value):
            if known[0] == "numpy.array" and value.ndim and (message := self._refer(value)) is not None:
                return message
            return ["k", known[0], self.encode(known[1])]
        kind = type(value)
        if kind.__module__ == "numpy" and hasattr(value, "item") and kind.__name__ != "ndarray":
            return ["n", self.encode(value.item())]
        number = self._number(value)
        if base := next((base for base in DATA if isinstance(value, base)), None):
            return ["x", self.encode(values.plain(base, value)), number, kind.__name__]
        return ["h", number, "coroutine" if isinstance(value, types.CoroutineType) else "object"]

    def _exported_class(self, kind: type) -> list[Any]:
        kind = SystemExit if kind is ExitError else kind
        name = values.class_name(kind)
        if name and (self.is_judge or values.is_data(kind)):
            return ["C", *name]
        if issubclass(kind, BaseException):
            bases = [base for base in kind.__bases__ if issubclass(base, BaseException)]
            return ["e", self._number(kind), kind.__name__, [self.encode(base) for base in bases]]
        return ["h", self._number(kind), "class"]

    def _load(self, message: list[Any]) -> Any:
        match message:
            case ["h", int(number), role]:
                found = self.stand_in(number, "object" if self.is_judge else "made")
                return awaited(found) if role == "coroutine" else found
            case ["o", int(number)]:
                return self._exported[number]
            case ["r", int(number), *content]:
                return self._replica(number, content)
            case ["g", int(place)]:
                return self._identities.given[place]
            case ["x", data, number, name]:
                return data_stand_in(self.decode(data), self, int(number), str(name))
            case ["C", str(place), str(name)]:
                return self._library_class(place, name)
            case ["e", int(number), str(name), [*bases]]:
                return self._error_class(number, name, bases)
            case ["E", int(number), kind, *parts]:
                return self._error(number, kind, parts)
            case ["k", known, parts] if known in values.KNOWN:
                return self._known(known, parts)
            case ["n", number]:
                self.has_numpy_numbers = True
                return self.decode(number)
            case ["m", str(name)]:
                return values.module(name)
        raise values.FrameError(f"a value of unknown kind {message[0]!r:.40}")

    def _known(self, name: str, parts: Any) -> Any:
        taken = self._identities.taken if name in values.CHANGEABLE_NAMES else None
        place = len(taken) if taken is not None else -1
        if taken is not None:
            taken.append(None)
        made = values.made_from(name, self.decode(parts))
        if taken is not None:
            taken[place] = made if hasattr(made, "__len__") else []  # an array without dimensions is a number
        return made

    def _replica(self, number: int, content: list[Any]) -> Any:
        """Return the copy of data that an object of the other side holds: the same each time."""
        if not content:
            return self._replicas.find(number)
        with self._encoding():
            value = self.decode(content[0])
        self._replicas.add(value, number, is_mine=False)
        return value

    def _library_class(self, place: str, name: str) -> type:
        kind = values.library_class(place, name)
        if kind is None or (self.is_judge and not values.is_data(kind)):
            raise values.FrameError(f"not a class of data: {place}.{name}"[:200])
        return ExitError if kind is SystemExit and self.is_judge else kind

    def _error_class(self, number: int, name: str, bases: list[Any]) -> type[BaseException]:
        if number not in self._kinds:
            decoded = [self.decode(base) for base in bases]
            self._kinds[number] = rebuilt_class(name, decoded, self, number)
        return self._kinds[number]

    def _error(self, number: int, kind: Any, parts: list[Any]) -> BaseException:
        with self._encoding():
            return self._decoded_error(number, kind, parts)

    def _decoded_error(self, number: int, kind: Any, parts: list[Any]) -> BaseException:
        kind = self.decode(kind)
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise values.FrameError("an exception of no class")
        if number not in self.held or not isinstance(self.held[number], BaseException):
            args, text, own, cause, is_cause = parts
            made = rebuilt_error(kind, self.decode(args), str(text), self.decode(own), self, number)
            self.held[number] = made
            linked = self.decode(cause)
            if isinstance(linked, BaseException):
                if is_cause:
                    made.__cause__ = linked
                else:
                    made.__context__ = linked
        found: BaseException = self.held[number]
        return found


REQUESTS: dict[str, Callable[..., tuple[Any, ...]]] = {  # what the other side may ask for
    "call": Peer._call,
    "make": Peer._make,
    "name": Peer._name,
    "define": Peer._define,
    "op": Peer._operate,
    "library": Peer._library,
    "get": Peer._get,
    "set": Peer._set,
}
_random = random.Random(os.urandom(8))


def _class_of(value: Any) -> type:
    """Return a class, or that of any other value."""
    return value if isinstance(value, type) else type(value)


def _is_of_tests(value: Any) -> bool:
    return _class_of(value).__module__ == "__main__"


def _is_open(value: Any, name: str) -> bool:
    """Whether a program may reach an attribute of an object of the library, which cannot change a verdict."""
    if isinstance(value, io.StringIO | io.BytesIO):
        return True
    kind = type(value)  # a mock, whose own methods check it, or set its attributes
    return kind.__module__ == "unittest.mock" and not hasattr(kind, name)


def _signature(function: Any) -> Any:
    """Return the parameters of a function of the tests."""
    inspect = importlib.import_module("inspect")  # seldom loaded
    found = inspect.signature(function).parameters.values()
    return [(one.name, int(one.kind), () if one.default is one.empty else (one.default,)) for one in found]


def _decoys(data: Any) -> tuple[Any, Any]:
    """Return data like some other, but of no meaning: what is in it is random."""
    low, high = -(1 << 60) - _random.getrandbits(40), (1 << 60) + _random.getrandbits(40)
    if isinstance(data, str):
        return f"\0{high:x}", f"\U0010ffff{low:x}"
    if isinstance(data, list | tuple):
        kind = list if isinstance(data, list) else tuple
        return kind([low] * len(data)), kind([high] * len(data))
    if isinstance(data, set | frozenset):
        return {low}, {high}
    return ({low: low}, {high: high}) if isinstance(data, dict) else (low, high)


def _hiding(value: Any) -> list[type]:
    """Return the classes in a program's value by which `except` would hide failed assertions."""
    kinds = value if isinstance(value, tuple) else (value,)
    hiding = (AssertionError, Exception, BaseException)
    return [kind for kind in hiding if any(kind is one for one in kinds)]


def _nothing() -> list[Any]:
    return []


def _fresh_count() -> int:
    """Return the number of references to what a function returned, if nobody else holds it."""
    result: list[Any] = _nothing()
    return sys.getrefcount(result)


_FRESH = _fresh_count()
