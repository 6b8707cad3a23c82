"""Calls between tests and the program that they test, each in a sandbox of its own.

Data is copied. Functions, classes and other objects stay where they are: the other side gets stand-ins for
them. There are two requests: a call of a function of the other side, and an operation on its objects, such as
an addition or a look at an attribute.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from retrain.plugins.sandbox.inside import confine, values
from retrain.plugins.sandbox.inside.replicas import LONGEST, Replicas
from retrain.plugins.sandbox.inside.stand_in import (
    DATA,
    LENDING,
    OPERATIONS,
    ExitError,
    StandIn,
    Visitor,
    awaited,
    data_stand_in,
    number_of,
    operate,
    parts_of,
    rebuilt_class,
    rebuilt_error,
)

RESULT, ERROR, UNSENT = "=", "!", "~"  # kinds of answers; the last: a value that cannot be handed over
UNREAD = (values.FrameError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, ImportError)


class BrokenError(BaseException):
    """The other side has ended or sent what is no answer; tests must not catch it."""


class Peer:
    """One end of a conversation: the program's, which serves all its names."""

    is_judge = False
    stand_in_kind: type[StandIn] = Visitor

    def __init__(self, frames: values.Frames, writes: int, names: dict[str, Any] | None = None) -> None:
        self._frames, self._writes = frames, writes
        self._exported: list[Any] = [names]
        self._numbers: dict[int, int] = {}
        self._stand_ins: dict[tuple[int, str], StandIn] = {}  # by number and role
        self.held: dict[int, Any] = {}  # data of subclasses and exceptions, by number
        self._kinds: dict[int, type[BaseException]] = {}  # classes of exceptions, by number
        self._turn = threading.RLock()  # a thread's until it has its answer
        self._printed = io.StringIO()  # by the program, since the last answer
        self._warned: list[Any] = []
        self.replicas = Replicas()
        self._longest, self._marks = 0, False  # of data that is shared, not copied; whether it may be changed
        self.has_ended = False
        self.garbage = ""
        self.doubt = ""  # why tests may fail by what this cannot do
        self.needs_sharing = False  # tests subclass a class of the program
        self.has_numpy_numbers = False

    def serve(self) -> None:
        """Answer requests until the other side ends."""
        sys.stdout = self._printed

        def note_warning(message: Any, category: type[Warning], *_: Any) -> None:
            self._warned.append([self.encode(category), str(message)[:2000]])

        setattr(warnings, "showwarning", note_warning)  # noqa: B010 - as warnings documents it
        warnings.simplefilter("always")
        with contextlib.suppress(EOFError):
            while True:
                self._answer(self._read())

    # requests

    def ask(self, *request: Any) -> Any:
        """Send a request; return its result's message, or raise its exception, or a BrokenError."""
        try:
            with self._turn, self._reading():
                self._send(*request)
                while (message := self._read())[0] not in (RESULT, ERROR, UNSENT):
                    self._answer(message)
                kind, *content = message
                if kind == UNSENT:
                    self.doubt = str(content[0])[:200]
                    raise BrokenError(self.doubt)
                if kind == RESULT:
                    (result,) = content
                    return result
                error = self.decode(content[0])
                if not isinstance(error, BaseException):
                    raise values.FrameError("an exception that is none")
        except (EOFError, OSError):
            self.has_ended = True
            raise BrokenError("the program has ended") from None
        raise error

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Take problems with what the other side has sent for garbage."""
        try:
            yield
        except UNREAD as problem:
            self.garbage = f"{problem}"[:200]
            raise BrokenError(self.garbage) from None

    def perform(self, name: str, *operands: Any) -> Any:
        """Return the message of what an operation gives on the other side."""
        with self._turn:
            with self._sharing(LONGEST):
                messages = [*map(self.encode, operands)]
            return self.ask("op", name, messages)

    def request(self, name: str, *operands: Any) -> Any:
        """Return what an operation gives on the other side."""
        return self.decode(self.perform(name, *operands))

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, makes: bool = False) -> Any:
        """Call a function of the other side by its number there.

        `makes`: it is a class, whose objects stay there even if they are data.
        """
        with self._turn:
            with self._sharing(sys.maxsize):
                positional = [self.argument(value) for value in args]
                named = [[key, self.argument(value)] for key, value in kwargs.items()]
            return self.decode(self.ask("call", number, positional, named, makes))

    def argument(self, value: Any) -> Any:
        """Return the message of an argument."""
        return self.encode(value)

    def attribute(self, value: StandIn, name: str) -> Any:
        """Return an attribute of an object of the other side."""
        return self.request("getattr", value, name)

    def stand_in(self, number: int, role: str) -> StandIn:
        """Return the stand-in for an object in a role: the same each time."""
        if (key := (number, role)) not in self._stand_ins:
            self._stand_ins[key] = self.stand_in_kind(self, number, role)
        return self._stand_ins[key]

    # what only tests must not do with a program's objects

    def contains(self, container: StandIn, value: Any) -> bool:
        """Whether something is in an object of the other side."""
        return bool(operate("contains", container, value))

    def check_length(self, value: StandIn) -> None:
        """Raise TypeError if tests may not ask for an object's length."""

    def check_loop(self) -> None:
        """Raise TypeError if tests may not loop over an asynchronous generator."""

    def suspect_comparison(self, name: str, operands: Sequence[Any]) -> None:
        """Note that plain Python may accept an operator of the program on data."""

    def may_swallow(self, trace: Any) -> bool:
        """Whether a context manager may end a block by an error there."""
        return True

    # answers

    def _answer(self, message: list[Any]) -> None:
        try:
            kind, *request = message
            answer = self._call(*request) if kind == "call" else self._operate(*request)
        except BrokenError:
            raise
        except values.FrameError as problem:
            answer = [UNSENT, str(problem)]
        except BaseException as error:  # noqa: BLE001 - it is the other side's to handle
            confine.tell_of_limits(error)
            try:
                answer = [ERROR, self.encode(error)]
            except Exception:  # noqa: BLE001 - its own __str__ fails, or a value that cannot be handed over
                parts = [["t", []], "", ["d", []], None, False]
                answer = [ERROR, ["E", self._number(error), self.encode(type(error)), *parts]]
            if not self.is_judge:
                _drop_frames(error)
        try:
            self._send(*answer)
        except values.FrameError as problem:
            self._send(UNSENT, str(problem))

    def _call(self, number: int, args: Any, kwargs: Any, makes: Any) -> list[Any]:
        positional = [*map(self.decode, args)]
        named = {key: self.decode(argument) for key, argument in kwargs}
        result = self._exported[number](*positional, **named)
        is_held = sys.getrefcount(result) > FRESH
        if makes and isinstance(result, tuple(values.CHANGEABLE)) and type(result) not in values.CHANGEABLE:
            return [RESULT, ["h", self._number(result), "object"]]
        with self._sharing(LONGEST if is_held else 0, marks=True):
            return [RESULT, self.encode(result)]

    def _operate(self, name: str, messages: Any) -> list[Any]:
        operands = [*map(self.decode, messages)]
        if name in ("name", "define"):
            operands.insert(0, self._exported[0])
        self.check_operation(name, operands, messages)
        result = OPERATIONS[name](*operands)
        with self._sharing(LONGEST if name in LENDING else 0, marks=True):
            return [RESULT, self.encode(result)]

    def check_operation(self, name: str, operands: Sequence[Any], messages: Sequence[Any]) -> None:
        """Raise what keeps the other side from an operation on objects here."""

    # messages

    def _send(self, kind: str, *content: Any) -> None:
        """Write a message, with what was printed and changed; FrameError if changes cannot be sent."""
        changes = self.replicas.changes(self._content)
        dropped = self.replicas.drop_unheld()
        notes: Any = ""
        if changes or any(dropped) or self._warned or self._printed.tell():
            notes = [self._printed.getvalue(), changes, dropped, self.replicas.has_lost, self._warned]
            self._warned = []
            self._printed.seek(0)
            self._printed.truncate()
        frame = values.frame([kind, notes, *content])
        if len(frame) > values.LONGEST_FRAME:
            self.doubt = f"a value of {len(frame) >> 20} MB is too large to be handed over"
            if self.is_judge:
                raise BrokenError(self.doubt)
            frame = values.frame([UNSENT, "", self.doubt])
        values.write(self._writes, frame)

    def _read(self) -> list[Any]:
        """Return the next message, without its notes, which are followed."""
        kind, notes, *content = self._frames.read()
        if isinstance(notes, list):
            printed, changes, dropped, has_lost, warned = notes
            sys.stdout.write(str(printed))
            for is_theirs, number, changed in changes:
                self.take(not is_theirs, number, self.decode(changed))
            self.replicas.drop(*dropped)
            self.replicas.has_lost |= bool(has_lost)
            for kind_of_warning, text in warned:
                category = self.decode(kind_of_warning)
                if isinstance(category, type) and issubclass(category, Warning):
                    warnings.warn(str(text), category, stacklevel=5)
        return [kind, *content]

    def take(self, is_mine: bool, number: int, content: Any) -> None:
        """Follow a change of the other side."""
        self.replicas.find(is_mine, number).take(content)

    @contextlib.contextmanager
    def _sharing(self, longest: int = 0, *, marks: bool = False) -> Iterator[None]:
        """Encode data of fewer items as what both sides have; `marks`: the other may change it."""
        before = self._longest, self._marks
        self._longest, self._marks = longest, marks
        try:
            yield
        finally:
            self._longest, self._marks = before

    def encode(self, value: Any) -> Any:
        """Return a value as JSON; FrameError if it cannot be handed over."""
        return values.encode(value, self._export, self._refer)

    def decode(self, message: Any) -> Any:
        """Return the value that JSON stands for; BrokenError if it stands for none."""
        if not isinstance(message, list | dict):
            return message
        with self._reading():
            return values.decode(message, self._load)

    def _content(self, container: Any) -> Any:
        """Return the message of the content of data with an identity."""
        with self._sharing():
            return values.copied(values.content_of(container), self._export, self._refer, 0)

    def _refer(self, value: Any, depth: int) -> Any:
        """Return what stands for data with an identity, which the other side has or is to have as well."""
        content: list[Any] = []
        if (place := self.replicas.use(value)) is None:
            if len(value) >= self._longest:
                return None
            place = (True, self.replicas.add(value))
            self.replicas.use(value)
            value = self.replicas.find(*place).value
            content = [values.copied(value, self._export, self._refer, depth)]
        self.replicas.find(*place).may_change |= self._marks
        return ["r" if place[0] else "g", place[1], *content]

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
            kind = SystemExit if value is ExitError else value
            name = values.class_name(kind)
            if name and (self.is_judge or values.is_data(kind)):
                return ["C", *name]
            if issubclass(kind, BaseException):
                bases = [base for base in kind.__bases__ if issubclass(base, BaseException)]
                return ["e", self._number(kind), kind.__name__, [self.encode(base) for base in bases]]
            return ["h", self._number(kind), "class"]
        if isinstance(value, BaseException):
            with self._sharing():
                return ["E", self._number(value), self.encode(type(value)), *parts_of(value, self.encode)]
        if known := values.parts_of(value):
            return ["k", known[0], self.encode(known[1])]
        kind = type(value)
        if kind.__module__ == "numpy" and hasattr(value, "item") and kind.__name__ != "ndarray":
            return ["n", self.encode(value.item())]
        number = self._number(value)
        if base := next((base for base in DATA if isinstance(value, base)), None):
            return ["x", self.encode(values.plain(base, value)), number, kind.__name__]
        return ["h", number, "coroutine" if isinstance(value, types.CoroutineType) else "object"]

    def _load(self, message: list[Any]) -> Any:
        match message:
            case ["o", int(number)]:
                return self._exported[number]
            case ["g", int(number)]:
                return self.replicas.find(True, number).value
            case ["r", int(number), *content]:
                return self._shared(number, content)
            case ["e" | "E", int(number), *parts]:
                return self._exception(number, parts, is_class=message[0] == "e")
            case ["h", int(number), role]:
                stand_in = self.stand_in(number, "object" if self.is_judge else "made")
                return awaited(stand_in) if role == "coroutine" else stand_in
            case ["x", data, number, name]:
                return data_stand_in(self.decode(data), self, int(number), str(name))
            case ["C", str(place), str(name)]:
                kind = values.library_class(place, name)
                if kind is None or (self.is_judge and not values.is_data(kind)):
                    raise values.FrameError(f"not a class of data: {place}.{name}"[:200])
                return ExitError if kind is SystemExit and self.is_judge else kind
            case ["k", known, parts] if known in values.KNOWN:
                return values.made_from(known, self.decode(parts))
            case ["n", number]:
                self.has_numpy_numbers = True
                return self.decode(number)
            case ["m", str(name)]:
                return values.module(name)
        raise values.FrameError(f"a value of unknown kind {message[0]!r:.40}")

    def _exception(self, number: int, parts: Sequence[Any], *, is_class: bool) -> Any:
        """Return an exception of the other side, or a class of them: the same each time."""
        if is_class:
            if number not in self._kinds:
                name, bases = parts
                self._kinds[number] = rebuilt_class(str(name), [*map(self.decode, bases)], self, number)
            return self._kinds[number]
        if not isinstance(self.held.get(number), BaseException):
            with self._sharing():
                kind, *others = map(self.decode, parts)
            self.held[number] = rebuilt_error(kind, others, self, number)
        return self.held[number]

    def _shared(self, number: int, content: list[Any]) -> Any:
        """Return data of the other side, of which it sends the content where this side has none yet."""
        if not content:
            return self.replicas.find(False, number).value
        if content[0][0] not in ("l", "d", "s"):
            self.replicas.add(value := self.decode(content[0]), number)
            return value
        self.replicas.add(value := values.BUILDERS[content[0][0]](()), number)  # it may hold itself
        decoded = self.decode(content[0])
        self.replicas.find(False, number).take(decoded)
        return value


def _drop_frames(error: BaseException | None) -> None:
    """Have an exception hold no data of the functions that it came through."""
    seen: list[Any] = []
    while error is not None and error not in seen:
        seen.append(error.with_traceback(None))
        error = error.__cause__ or error.__context__


def _fresh_count() -> int:
    result: list[Any] = list()
    return sys.getrefcount(result)


FRESH = _fresh_count()  # references to what a function returned, if nobody else holds it
