"""Exceptions of another sandbox: those of the library are rebuilt, others get a class of the same name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from retrain.plugins.sandbox.inside import values

if TYPE_CHECKING:
    from retrain.plugins.sandbox.inside.peer import Peer

MOST_BASES, LONGEST_CHAIN = 20, 8  # classes from one to BaseException; causes of one
FILE_NAMES = ("filename", "filename2", "name", "path", "msg")  # attributes that are no part of `args`


class ExitError(SystemExit):
    """The program's own `SystemExit`, which is no end of the tests."""


class ErrorKind(type):
    """The class of classes of exceptions that were rebuilt: the other side makes their objects."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        peer, number = vars(cls)["_retrain_peer"], vars(cls)["_retrain_number"]
        return peer.call(number, args, kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        peer, number = vars(cls)["_retrain_peer"], vars(cls)["_retrain_number"]
        return peer.decode(*peer.ask("get", number, name))


def _attribute(error: BaseException, name: str) -> Any:
    own = vars(error)
    if name.startswith("_") or "_retrain_number" not in own:
        raise AttributeError(name)
    return own["_retrain_peer"].decode(*own["_retrain_peer"].ask("get", own["_retrain_number"], name))


def _text(error: BaseException) -> str:
    return str(vars(error).get("_retrain_text", ""))


def rebuilt_class(name: str, bases: Sequence[Any], peer: Peer, number: int) -> type[BaseException]:
    """Return a class of exceptions that stands for one of the other side.

    Raises:
        FrameError: it cannot be.
    """
    kinds = [base for base in bases if isinstance(base, type) and issubclass(base, BaseException)]
    if not kinds or len(kinds[0].__mro__) > MOST_BASES:
        raise values.FrameError("an exception of no class")
    own = {
        "_retrain_peer": peer,
        "_retrain_number": number,
        "__getattr__": _attribute,
        "__str__": _text,
        "__module__": "solution",
    }
    try:
        return cast(type[BaseException], ErrorKind(name, tuple(kinds), own))
    except TypeError:  # bases that C cannot combine
        return cast(type[BaseException], ErrorKind(name, (kinds[0],), own))


def rebuilt_error(
    kind: type[BaseException], args: Any, text: str, own: dict[str, Any], peer: Peer, number: int
) -> BaseException:
    """Return an exception like one of the other side; its class makes none itself."""
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
    vars(error).update(_retrain_number=number, _retrain_peer=peer, _retrain_text=text)
    return error


def told(error: BaseException, encode: Callable[[Any], Any], depth: int = 0) -> list[Any]:
    """Return the parts of an exception: arguments, text, attributes, cause, and whether it is one."""
    own = {str(name): value for name, value in vars(error).items() if name[:1] != "_" or name == "__notes__"}
    for name in FILE_NAMES:
        if isinstance(value := getattr(error, name, None), str):
            own.setdefault(name, value)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    chain, one = 0, cause
    while one is not None and chain <= LONGEST_CHAIN:
        chain, one = chain + 1, one.__cause__ or one.__context__
    told_cause = encode(cause) if chain <= LONGEST_CHAIN else None
    return [
        encode(error.args),
        str(error)[:2000],
        encode(own),
        told_cause,
        error.__cause__ is not None,
    ]
