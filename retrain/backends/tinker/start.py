"""Starts a run from a state at the API: whether there is one, and whether it fits the run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from tinker.types import WeightsInfoResponse

from retrain.backends import BackendSpec
from retrain.backends.tinker.faults import FAULTS, Fault, classify, describe, lacks_route
from retrain.backends.tinker.rest import ask
from retrain.config.adapters import state_of
from retrain.config.schema import Config, Model

ANSWER_S = 10.0  # until what is not known yet is left to the run
TRAINED = re.compile(r"tinker://[^/]+/weights/[^/]+")
GONE = (Fault.LOST, Fault.WRONG, Fault.REFUSED)


def start_problems(config: Config) -> Iterator[str]:
    """Iterate over why a run cannot start from its adapter."""
    adapter = config.model.adapter
    path = state_of(adapter)
    if not path:
        yield (
            f"{adapter!r} is no state at the Tinker API, where retrain uploads no weights; name a finished "
            "run of backend 'tinker', or a state, tinker://RUN/weights/NAME"
        )
    elif not TRAINED.fullmatch(path):
        yield (
            f"{path!r} cannot be trained further; name a state that was saved for training, "
            "tinker://RUN/weights/NAME"
        )
    else:
        found = _info(config.model.base_url, path)
        if isinstance(found, str):
            yield f"the Tinker API refuses {path} ({found}); name a state that it has"
        elif found and (wrong := mismatch(found.base_model, found.lora_rank, config.model)):
            yield f"{path} {wrong}"


def mismatch(model: str | None, rank: int | None, wanted: BackendSpec | Model) -> str:
    """Return what a state has not in common with a run; "" if it fits, as far as the API tells."""
    if model and model != wanted.model:
        return f"was trained on {model!r}, not on [model].model = {wanted.model!r}"
    if rank and rank != wanted.lora_rank:
        return f"has rank {rank}, the run [model].lora_rank = {wanted.lora_rank}; make them equal"
    return ""


@cache  # conditions share it
def _info(url: str, path: str) -> WeightsInfoResponse | str | None:
    """Return what the API knows of a state, or why it has none; None if it does not tell."""
    try:
        found: WeightsInfoResponse = ask(
            url, lambda client: client.get_weights_info_by_tinker_path(path), ANSWER_S
        )
        return found
    except FAULTS as error:
        return describe(error) if classify(error) in GONE and not lacks_route(error) else None
