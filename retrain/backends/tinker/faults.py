"""Classification of call failures, which decides whether to retry, rebuild or stop."""

from __future__ import annotations

import re
from enum import Enum, auto

import httpx
from tinker import APIConnectionError, APIStatusError, RequestFailedError, TinkerError
from tinker.lib.retryable_exception import RetryableException
from tinker.types import RequestErrorCategory

from retrain.controllers.permits import OVERLOAD

# exceptions that pass through the SDK; its own checks raise plain ValueError and RuntimeError
FAULTS: tuple[type[Exception], ...] = (
    TinkerError,
    RetryableException,
    httpx.HTTPError,
    OSError,  # includes TimeoutError and ConnectionError
    ValueError,
    RuntimeError,
)


class Fault(Enum):
    """Four kinds of failure."""

    BUSY = auto()  # overload, timeout, connection: the same call may succeed later
    LOST = auto()  # the session, model or sampler is gone or unusable: rebuild, then retry
    WRONG = auto()  # the API rejects the request: a retry would not help
    REFUSED = auto()  # the API rejects the key


_STATUS = re.compile(r"\bstatus[ =](\d{3})\b")  # the SDK reports the status of fetched results only as text


def classify(error: Exception) -> Fault:
    """Return the kind of an error."""
    status = _status(error)
    if status is not None:
        return _by_status(status)
    if isinstance(error, RequestFailedError):
        return Fault.WRONG if error.category is RequestErrorCategory.User else Fault.LOST
    if isinstance(error, TinkerError) and "api_key" in str(error):
        return Fault.REFUSED
    if isinstance(error, OSError | httpx.HTTPError | APIConnectionError):
        return Fault.BUSY
    return Fault.LOST


def is_overload(error: Exception) -> bool:
    """Whether the API reported overload."""
    return _status(error) in OVERLOAD


def describe(error: Exception) -> str:
    """Return an error as one line; the class name if it has no text."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _status(error: Exception) -> int | None:
    if isinstance(error, APIStatusError):
        return int(error.status_code)
    found = _STATUS.search(str(error)) if isinstance(error, ValueError) else None
    return int(found[1]) if found else None


def _by_status(status: int) -> Fault:
    if status in (401, 403):
        return Fault.REFUSED
    if status in (404, 409, 410):
        return Fault.LOST
    # 402, payment required: the SDK has waited; the bill may be paid before the run is retried
    if status in (402, 408, 429) or status >= 500:
        return Fault.BUSY
    return Fault.WRONG
