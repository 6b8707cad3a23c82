"""Classification of call failures, which decides whether to retry, rebuild or stop."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

import httpx
from tinker import APIConnectionError, APIStatusError, RequestFailedError, TinkerError
from tinker.lib.retryable_exception import RetryableException
from tinker.types import RequestErrorCategory

from retrain.control.rules.concurrency_limit import OVERLOAD

# exceptions that pass through the SDK; its own checks raise plain ValueError and RuntimeError
FAULTS: tuple[type[Exception], ...] = (
    TinkerError,
    RetryableException,
    httpx.HTTPError,
    OSError,  # includes TimeoutError and ConnectionError
    ValueError,
    RuntimeError,
    AssertionError,  # a response lacks what the SDK relies on
)


REFUSALS = (400, 401, 402, 403, 422, 429)


class Fault(Enum):
    """Six kinds of failure."""

    BUSY = auto()  # overload, timeout, connection, no room: the same call may succeed later
    LOST = auto()  # the session, model or sampler is gone: rebuild, then retry
    BROKEN = auto()  # for an unknown reason: as if it were lost
    WRONG = auto()  # the API rejects the request: a retry would not help
    REFUSED = auto()  # the API rejects the key
    OLD = auto()  # the API answers in a form that the SDK does not read


_STATUS = re.compile(r"\bstatus[ =](\d{3})\b")  # the SDK reports the status of fetched results only as text
# what servers say of something that they had; ids, which may contain such words, are left out
_GONE = (
    r"{what}\b(?![-:])[^/]{{0,200}}?"
    r"\b(?:not (?:loaded|found|active|known)|no longer|expired|does not exist|unloaded|evicted)"
    r"|\b(?:no|unknown|expired) {what}\b(?![-:])"
)
_LOST = re.compile(_GONE.format(what=r"\b(?:model|session|sampler)"), re.IGNORECASE)
_LOST_SESSION = re.compile(_GONE.format(what=r"\bsession"), re.IGNORECASE)
_FULL = re.compile(r"maximum number of (?:lora )?(?:adapters|models)", re.IGNORECASE)
_OLD = re.compile(r"only supports as proto|predates proto|proto deserialization failed", re.IGNORECASE)
_TOO_LONG = re.compile(r"context (?:window|length|size)|prompt (?:is )?too long", re.IGNORECASE)
_NO_ROUTE = re.compile(r"'detail': 'Not Found'|not (?:supported|implemented)", re.IGNORECASE)


def classify(error: Exception) -> Fault:
    """Return the kind of an error: what it says of the server counts more than its status."""
    status, said = _status(error), str(error)
    if status in (401, 403):
        return Fault.REFUSED
    if _OLD.search(said):
        return Fault.OLD
    # 402, payment required: the SDK has waited; the bill may be paid before the run is retried
    if _FULL.search(said) or status in (402, 408, *OVERLOAD):
        return Fault.BUSY
    if _LOST.search(said) or status in (404, 409, 410):
        return Fault.LOST
    if status is not None:
        return Fault.BUSY if status >= 500 else Fault.WRONG
    if isinstance(error, RequestFailedError):
        return Fault.WRONG if error.category is RequestErrorCategory.User else Fault.BROKEN
    if isinstance(error, TinkerError) and "api_key" in said:
        return Fault.REFUSED
    if isinstance(error, OSError | httpx.HTTPError | APIConnectionError):
        return Fault.BUSY
    return Fault.OLD if isinstance(error, AssertionError) else Fault.BROKEN


def is_overload(error: Exception) -> bool:
    """Whether the API reported overload."""
    return _status(error) in OVERLOAD


def is_unpaid(error: Exception) -> bool:
    """Whether the API waits for a bill to be paid."""
    return _status(error) == 402


@contextmanager
def status_told() -> Iterator[None]:
    """Raise what the API answered where the SDK, not connected yet, fails at noting that it is unpaid."""
    try:
        yield
    except AttributeError as error:
        if isinstance(error.__context__, APIStatusError):
            raise error.__context__ from None
        raise


def is_refused_unbilled(error: Exception) -> bool:
    """Whether the API refused a request before it did anything; after other errors it may have done it.

    The SDK reports the status of a request as an error of its own, and that of a poll for its result as text.
    """
    return isinstance(error, APIStatusError) and error.status_code in REFUSALS


def is_full(error: Exception) -> bool:
    """Whether the API has no room for another model."""
    return _FULL.search(str(error)) is not None


def has_lost_model(error: Exception) -> bool:
    """Whether the API says that it has lost the session, or a model or sampler of it."""
    return _status(error) in (409, 410) or _LOST.search(str(error)) is not None


def is_too_long(error: Exception) -> bool:
    """Whether the API rejects a prompt because it has no room in the model's context."""
    return _TOO_LONG.search(str(error)) is not None


def is_refusal(error: Exception) -> bool:
    """Whether the API refuses what a model is to be made of, and not because its session is lost."""
    about_session = _status(error) in (409, 410) or _LOST_SESSION.search(str(error)) is not None
    return classify(error) is Fault.WRONG or (classify(error) is Fault.LOST and not about_session)


def lacks_route(error: Exception) -> bool:
    """Whether the server does not know a kind of request, rather than what is asked for."""
    return _status(error) in (405, 422, 501) or _NO_ROUTE.search(str(error)) is not None


def describe(error: Exception) -> str:
    """Return an error as one line; the class name if it has no text."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _status(error: Exception) -> int | None:
    if isinstance(error, APIStatusError):
        return int(error.status_code)
    match = _STATUS.search(str(error)) if isinstance(error, ValueError) else None
    return int(match[1]) if match else None
