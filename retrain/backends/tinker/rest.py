"""Questions to the API that need no session, and states that are deleted there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any

import tinker

from retrain.backends.tinker.faults import FAULTS, Fault, classify, describe
from retrain.config.schema import Config
from retrain.event_loop import begun

DELETE_S = 30.0  # for each state


def ask(url: str, question: Callable[[tinker.RestClient], Any], answer_s: float) -> Any:
    """Return the answer to a question, at the API's default address if `url` is empty.

    Raises a TimeoutError after `answer_s`: the SDK tries again for minutes, without a word. It waits for the
    server even before it has a client, hence the thread.
    """
    return begun(lambda: question(tinker.RestClient(base_url=url or None)).result()).result(answer_s)


def deleted(config: Config, paths: Sequence[str]) -> Mapping[str, str]:
    """Delete states; return each one's problem, "" if it is deleted or was gone before."""
    told = dict.fromkeys(paths, "")
    for number, path in enumerate(paths):
        try:
            ask(config.model.base_url, methodcaller("delete_checkpoint_from_tinker_path", path), DELETE_S)
        except TimeoutError:
            unanswered = f"not deleted: the API did not answer within {DELETE_S:g} s; try again later"
            return told | dict.fromkeys(paths[number:], unanswered)
        except FAULTS as error:
            told[path] = "" if classify(error) is Fault.LOST else describe(error)
    return told
