"""Deletes saved states at the API."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import tinker

from retrain.backends.tinker.faults import FAULTS, Fault, classify, describe
from retrain.config.schema import Config

ANSWER_S = 30.0  # the SDK tries again for minutes, without a word


def deleted(config: Config, paths: Sequence[str]) -> Mapping[str, str]:
    """Delete states; return each one's problem, "" if it is deleted or was gone before."""
    told = dict.fromkeys(paths, "")
    for number, path in enumerate(paths):
        try:
            _asked(config.model.base_url, path).result(ANSWER_S)
        except TimeoutError:
            unanswered = f"not deleted: the API did not answer within {ANSWER_S:g} s; try again later"
            return told | dict.fromkeys(paths[number:], unanswered)
        except FAULTS as error:
            told[path] = "" if classify(error) is Fault.LOST else describe(error)
    return told


def _asked(url: str, path: str) -> Future[None]:
    """Ask in a thread: the SDK waits for the server even before it has a client."""
    answer: Future[None] = Future()

    def ask() -> None:
        try:
            client = tinker.RestClient(base_url=url or None)
            answer.set_result(client.delete_checkpoint_from_tinker_path(path).result())
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer
