"""The tests' end of the conversation with the program, which gives nothing away and doubts what it is told.

What a program returns never runs code of its own where the tests are, and is never told a value that it is
compared with: a stand-in is equal to no data, and only an object that the tests made themselves, by calling a
class that they use as one, takes part in comparisons and arithmetic with data.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import itertools
import os
import random
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from retrain.plugins.sandbox.inside import values
from retrain.plugins.sandbox.inside.peer import BrokenError, Peer
from retrain.plugins.sandbox.inside.reading import OF_TESTS
from retrain.plugins.sandbox.inside.replicas import Replica
from retrain.plugins.sandbox.inside.stand_in import (
    COMPARING,
    DATA,
    DATA_METHODS,
    OF_PROGRAM,
    READING,
    StandIn,
    number_of,
    operate,
)

HIDING = (AssertionError, Exception, BaseException)  # by which `except` would hide failed assertions
MOST_ITEMS = 1000  # of an object of the program, in which the tests look for something
OF_NAMED_TUPLES = ("_asdict", "_fields", "_make", "_replace")
OPEN_NAMES = ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "__class__")
_random = random.Random(os.urandom(8))


class Judge(Peer):
    """The tests' end, which serves little."""

    is_judge = True
    stand_in_kind = StandIn

    def __init__(self, frames: values.Frames, writes: int) -> None:
        super().__init__(frames, writes)
        self.used = False
        self.hides_changes = False  # of arguments, by functions that return something
        self.changes_all = False
        self.refused: tuple[type[BaseException], ...] = ()  # what no call may raise, as a loop would end
        self.swallows: set[int] = set()  # lines of the tests that skip nothing if they end a `with` block
        self.unchecked: set[int] = set()  # lines of `with` blocks that check nothing
        self.tried: set[int] = set()  # lines of the tests where an import may fail
        self.missing = ""  # why an import of the tests' own fails
        self.has_loops = self.asserts_in_async_loops = False
        self._changing: dict[int, Any] = {}
        self._depth = 0  # of requests, one in the other
        self._concealed: list[Replica] = []  # what the program has changed since the outermost of them
        self._copies: dict[int, tuple[Any, Any]] = {}  # of arguments that a function changed, and returned

    def ask(self, *request: Any) -> Any:
        self.used |= request[1] not in OF_PROGRAM
        self._depth += 1
        passed = [self.replicas.find(*place) for place in self.replicas.used]
        try:
            message = super().ask(*request)
            if message is None and self._depth == 1:  # an answer that says nothing
                for replica in passed:
                    replica.reveal()
                self._concealed = [replica for replica in self._concealed if replica not in passed]
            return message
        except self.refused as error:
            is_step = request[1] in ("next", "anext")
            if is_step and isinstance(error, StopIteration | StopAsyncIteration):
                raise
            raise RuntimeError(f"a call of the program raised {type(error).__name__}") from error
        finally:
            self._depth -= 1
            if self._concealed and not self._depth:
                self.hides_changes = True
                self._concealed.clear()

    def encode(self, value: Any) -> Any:
        try:
            return super().encode(value)
        except values.FrameError as problem:
            self.doubt = str(problem)
            raise BrokenError(self.doubt) from None

    def name(self, name: str) -> Any:
        """Return what a program calls by a name; raise AttributeError if that is nothing."""
        try:
            message = self.perform("name", name)
        except KeyError:
            raise AttributeError(name) from None
        # what is only imported is not used; calls of a class of Python's are not seen
        self.used |= not callable(value := self._reached(name, message)) or type(value) is type
        return value

    def attribute(self, value: StandIn, name: str) -> Any:
        message = self.perform("getattr", value, name)
        result = self._reached(name, message)
        is_odd = not value._is_made and not value._is_class
        if is_odd and name in DATA_METHODS and callable(result):
            if isinstance(message, list) and message[0] == "h" and message[2] == "object":

                def is_honest() -> bool:
                    try:
                        self.perform("getattr", value, f"a{_random.getrandbits(40):x}")
                    except AttributeError:
                        return True
                    return False  # it has any attribute

                self._suspect(f"the tests call {name!r} of an object that a function returned", is_honest)
            raise AttributeError(f"what the program returned is an object, not data with a {name!r}")
        return result

    def _reached(self, name: str, message: Any) -> Any:
        """Return what has a name; a class makes objects of the tests only if they use it as one.

        Otherwise a program could call its class like the function that tests expect, and its result would
        take part in `abs(f(2) - wanted) < 1e-6`.
        """
        value = self.decode(message)
        kinds = value if isinstance(value, tuple) else (value,)
        hiding = {one for one in HIDING if any(one is kind for kind in kinds)}
        if hiding and not name.startswith("_"):
            if AssertionError not in hiding:  # where a program names `Exception` anew
                self.doubt = self.doubt or f"{name} of the program is a class that catches failed assertions"
            return type(name, (Exception,), {})
        if isinstance(value, StandIn) and name[:1].isupper() and message[2:] == ["class"]:
            return self.stand_in(value._number, "class")
        return value

    def imported(
        self, name: str, namespace: Any = None, scope: Any = None, wanted: Any = (), level: int = 0
    ) -> Any:
        """Import a module as tests do, and note if it or what they want of it is not there."""
        if name.partition(".")[0] in OF_TESTS:
            return builtins.__import__(name, namespace, scope, wanted, level)
        try:
            module = builtins.__import__(name, namespace, scope, wanted, level)
            for attribute in wanted or ():
                if attribute != "*" and not hasattr(module, attribute):
                    raise ImportError(f"cannot import name {attribute!r} from {name!r}")
            return module
        except ImportError as error:
            if sys._getframe(1).f_lineno not in self.tried:
                self.missing = f"an import of the tests fails: {error}"[:200]
            raise

    # changes of arguments

    def may_change(self, value: Any) -> Any:
        """Return an argument that functions may change in place, whatever they return."""
        self._changing[id(value)] = value
        return value

    def argument(self, value: Any) -> Any:
        with self._sharing(sys.maxsize, marks=id(value) in self._changing):
            return super().argument(value)

    def take(self, is_mine: bool, number: int, content: Any) -> None:
        """Follow a change of the program, which tests do not see if its answer says something.

        Otherwise a function could also change what its result is compared with.
        """
        replica = self.replicas.find(is_mine, number)
        if is_mine and not (self.changes_all or replica.may_change):
            self.replicas.conceal(replica)
            self._copies[id(replica.value)] = replica.value, replica.shown
            self._concealed.append(replica)
        replica.take(content)

    # what an object is

    def is_same(self, one: Any, other: Any) -> bool:
        """Whether two values are one object, here or on the other side."""
        first, second = (self._copies.get(id(value), (value, value))[1] for value in (one, other))
        number = number_of(first)
        return first is second or (number is not None and number == number_of(second))

    def type_of(self, value: Any) -> Any:
        """Return the class of a value, wherever it is."""
        if number_of(value) is None or isinstance(value, type | BaseException):
            return type(value)
        kind = operate("type", value)
        return self.stand_in(kind._number, "class") if isinstance(kind, StandIn) else kind

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

    # what a program must not decide

    def _suspect(self, why: str, is_honest: Callable[[], bool]) -> None:
        """Note why plain Python may accept a program, unless what the program says is a cheat's."""
        with contextlib.suppress(Exception):  # the program's own; plain Python would meet one as well
            if not self.doubt and is_honest():
                self.doubt = why

    def suspect_comparison(self, name: str, operands: Sequence[Any]) -> None:
        """Note that plain Python may accept an operator of the program on data, unless it takes anything.

        The program is asked about other data of the same kind, never about that of the tests.
        """
        data = next(one for one in operands if number_of(one) is None)
        owner = next(one for one in operands if number_of(one) is not None)

        def is_honest() -> bool:
            if name in COMPARING and not operate("defines", owner, f"__{name}__"):
                return False
            low, high = [
                self.request(name, *(decoy if one is data else one for one in operands))
                for decoy in _decoys(data)
            ]
            if name in ("eq", "ne", "contains"):
                return [low, high] == [name == "ne"] * 2
            return bool(low != high)

        self._suspect("the tests let an object of the program decide how it compares with data", is_honest)

    def check_length(self, value: StandIn) -> None:
        """Raise TypeError if a loop over an object that the tests did not make could be shorter than it."""
        if not self.has_loops or value._is_made or value._is_class:
            return

        def is_honest() -> bool:
            length = operate("len", value)
            try:
                iter(value)
            except TypeError:
                return True
            # the next loop, as the first could be of another length
            return bool(length == sum(1 for _ in itertools.islice(value, MOST_ITEMS + 1)))

        self._suspect("the tests ask for the length of an object that a function returned", is_honest)
        raise TypeError("what the program returned is an object, not data with a length")

    def contains(self, container: StandIn, value: Any) -> bool:
        """Whether data is among what an object of the program holds, as a loop of the tests finds it."""
        if container._is_made or isinstance(value, StandIn):
            return super().contains(container, value)
        try:
            items = iter(container)
        except TypeError:
            self.suspect_comparison("contains", (container, value))
            return False
        first = list(itertools.islice(items, MOST_ITEMS + 1))  # a generator may have no end
        return len(first) <= MOST_ITEMS and value in first

    def check_loop(self) -> None:
        if self.asserts_in_async_loops:
            raise TypeError("a loop over an asynchronous generator of the program could skip its assertions")

    def may_swallow(self, trace: Any) -> bool:
        if trace is None or trace.tb_frame.f_code.co_filename != "tests.py":
            return False
        if trace.tb_lineno in self.unchecked and trace.tb_lineno not in self.swallows:
            self.doubt = self.doubt or "a context manager of the program ends a block of the tests"
        return trace.tb_lineno in self.swallows

    # what a program may do with objects of the tests

    def check_operation(self, name: str, operands: Sequence[Any], messages: Sequence[Any]) -> None:
        target = operands[0]
        if name == "getattr":
            _check_open(target, operands[1])
        elif name in ("setattr", "delattr"):
            _check_open(target, operands[1])
            if not _is_of_tests(target) or callable(getattr(_class_of(target), operands[1], None)):
                raise AttributeError(f"a method of the tests cannot be replaced: {operands[1]}")
        else:
            is_identity = name in ("eq", "ne") and all(
                isinstance(one, list) and one[0] == "o" for one in messages
            )
            is_safe = name in READING or name == "signature" or is_identity
            if name in OF_PROGRAM or not (is_safe or any(map(_is_of_tests, operands))):
                raise TypeError(f"not supported on an object of the tests: {name}")


def _class_of(value: Any) -> type:
    """Return a class, or that of any other value."""
    return value if isinstance(value, type) else type(value)


def _is_of_tests(value: Any) -> bool:
    return _class_of(value).__module__ == "__main__"


def _check_open(target: Any, name: str) -> None:
    """Raise AttributeError if the program may not reach an attribute, by which it could change a verdict."""
    kind = type(target)
    is_file = isinstance(target, io.StringIO | io.BytesIO)
    # a mock's own methods check it, or set its attributes
    is_mock = kind.__module__ == "unittest.mock" and not hasattr(kind, name)
    is_of_tests = _is_of_tests(target)
    is_public = not name.startswith("_") or (isinstance(target, tuple) and name in OF_NAMED_TUPLES)
    is_named = name in OPEN_NAMES and (is_of_tests or isinstance(target, types.FunctionType | type))
    if not is_named and not (is_public and (is_of_tests or is_file or is_mock)):
        raise AttributeError(name)


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
