"""Questions to the API that need no session."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import tinker

T = TypeVar("T")


def ask(url: str, question: Callable[[tinker.RestClient], Any], answer_s: float) -> Any:
    """Return the answer to a question, at the API's default address if `url` is empty.

    Raises a TimeoutError after `answer_s`: the SDK tries again for minutes, without a word. It waits for the
    server even before it has a client, hence the thread.
    """
    answer: Future[Any] = Future()

    def wait() -> None:
        try:
            answer.set_result(question(tinker.RestClient(base_url=url or None)).result())
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            answer.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    return answer.result(answer_s)
