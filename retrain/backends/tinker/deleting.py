"""Deletes saved states at the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import methodcaller

from retrain.backends.tinker.faults import FAULTS, Fault, classify, describe
from retrain.backends.tinker.rest import ask
from retrain.config.schema import Config

ANSWER_S = 30.0  # for each state


def deleted(config: Config, paths: Sequence[str]) -> Mapping[str, str]:
    """Delete states; return each one's problem, "" if it is deleted or was gone before."""
    told = dict.fromkeys(paths, "")
    for number, path in enumerate(paths):
        try:
            ask(config.model.base_url, methodcaller("delete_checkpoint_from_tinker_path", path), ANSWER_S)
        except TimeoutError:
            unanswered = f"not deleted: the API did not answer within {ANSWER_S:g} s; try again later"
            return told | dict.fromkeys(paths[number:], unanswered)
        except FAULTS as error:
            told[path] = "" if classify(error) is Fault.LOST else describe(error)
    return told
