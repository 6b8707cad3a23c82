"""Exceptions of another sandbox: those of the library are rebuilt, others get a class of the same name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from retrain.plugins.sandbox.inside import values
from retrain.plugins.sandbox.inside.stand_in import attribute_of

if TYPE_CHECKING:
    from retrain.plugins.sandbox.inside.peer import Peer

MOST_BASES, LONGEST_CHAIN = 20, 8  # classes from one to BaseException; causes of one
FILE_NAMES = ("filename", "filename2", "name", "path", "msg")  # attributes that are no part of `args`


class ExitError(SystemExit):
    """The program's own `SystemExit`, which is no end of the tests."""


class ErrorKind(type):
    """The class of classes of exceptions that were rebuilt: the other side makes their objects."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        own = vars(cls)
        return own["_retrain_peer"].call(own["_retrain_number"], args, kwargs)

    __getattr__ = attribute_of


def rebuilt_class(name: str, bases: Sequence[Any], peer: Peer, number: int) -> type[BaseException]:
    """Return a class of exceptions that stands for one of the other side.

    Raises:
        FrameError: it cannot be.
    """
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
    """Return an exception like one of the other side, from its parts; its class makes none itself.

    Raises:
        FrameError: it cannot be.
    """
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
