"""What went wrong with a call, as far as it decides what to do next."""

from __future__ import annotations

import re
from enum import Enum, auto

import httpx
from tinker import APIConnectionError, APIStatusError, RequestFailedError, TinkerError
from tinker.lib.retryable_exception import RetryableException
from tinker.types import RequestErrorCategory

from retrain.controllers.permits import OVERLOAD

# what the SDK lets through; its checks and its fetching of results raise plain ValueError and RuntimeError
FAULTS: tuple[type[Exception], ...] = (
    TinkerError,
    RetryableException,
    httpx.HTTPError,
    OSError,  # TimeoutError and ConnectionError among them
    ValueError,
    RuntimeError,
)


class Fault(Enum):
    """Four kinds of failure."""

    BUSY = auto()  # overload, timeout, connection: the same call may succeed later
    LOST = auto()  # the session, model or sampler is gone or unusable: rebuild, then retry
    WRONG = auto()  # the API refuses the request: a retry would not help
    REFUSED = auto()  # the key


_STATUS = re.compile(r"\bstatus[ =](\d{3})\b")  # results are fetched by the SDK, which hides the code in text


def classify(error: Exception) -> Fault:
    """Return the kind of a fault."""
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
    """Whether the API said that it has too much to do."""
    return _status(error) in OVERLOAD


def describe(error: Exception) -> str:
    """Return one line about an error; the class name for an exception without text."""
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
    # 402, the account's bill: the SDK has waited; it may be paid before the run is retried
    if status in (402, 408, 429) or status >= 500:
        return Fault.BUSY
    return Fault.WRONG
