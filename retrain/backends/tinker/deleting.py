"""Deletes saved states at the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tinker

from retrain.backends.tinker.faults import FAULTS, Fault, classify, describe
from retrain.config.schema import Config


def deleted(config: Config, paths: Sequence[str]) -> Mapping[str, str]:
    """Delete states; return each one's problem, "" if it is deleted or was gone before."""
    client = tinker.RestClient(base_url=config.model.base_url or None)
    return {path: _problem(client, path) for path in paths}


def _problem(client: tinker.RestClient, path: str) -> str:
    try:
        client.delete_checkpoint_from_tinker_path(path).result()
    except FAULTS as error:
        return "" if classify(error) is Fault.LOST else describe(error)
    return ""
