"""A remote policy: its saved states and updates, and its checkpoint on disk.

A checkpoint is a JSON file with the path of the state that the API saved.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.backends.tinker.wire import ApiLoss
from retrain.config.adapters import TINKER as NAME
from retrain.errors import RecordsError

if TYPE_CHECKING:
    from tinker import SamplingClient, TrainingClient
    from tinker.types import AdamParams, Datum

FORMAT = 1  # of the file; increment when old ones can no longer be read

BYTES_PER_TOKEN = 24  # in a request: input, target, log-probability, advantage, ratio mask


@dataclass(frozen=True, slots=True)
class State:
    """A policy saved at the API's `path` after `version` updates; an empty path is the initial policy."""

    path: str
    version: int
    reference: str = ""  # path of the weights that the KL term compares with; empty: the base model


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """The data and settings of one optimizer step."""

    data: list[Datum]
    loss: ApiLoss
    adam: AdamParams
    is_last: bool = True  # before it, sampling continues with the earlier policy

    def parts_for(self, training: TrainingClient) -> list[list[Datum]]:
        """Return the data in parts that the server takes in one request."""
        limits = training.holder.get_client_config()
        return self.parts(limits.fwdbwd_max_chunk_len, limits.fwdbwd_max_chunk_bytes_count)

    def parts(self, most_datums: int, most_bytes: int) -> list[list[Datum]]:
        """Return the data in parts of one request each."""
        parts: list[list[Datum]] = [[]]
        size = 0
        for datum in self.data:
            own = BYTES_PER_TOKEN * int(datum.model_input.length)
            if parts[-1] and (len(parts[-1]) == most_datums or size + own > most_bytes):
                parts.append([])
                size = 0
            parts[-1].append(datum)
            size += own
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class Sampler:
    """A sampling client and its policy version."""

    client: SamplingClient
    version: int


def write_state(directory: Path, state: State, model: str, rank: int) -> None:
    """Write the API's path of a saved policy, with its model and rank."""
    facts = {"format": FORMAT, **asdict(state), "model": model, "lora_rank": rank}
    (directory / NAME).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def read_state(directory: Path, model: str, rank: int) -> State:
    """Return the saved policy; a RecordsError if it is unreadable or of another model."""
    wanted = {"format": FORMAT, "model": model, "lora_rank": rank}
    try:
        facts = json.loads((directory / NAME).read_text(encoding="utf-8"))
        state = State(str(facts["path"]), int(facts["version"]), str(facts.get("reference", "")))
        pairs = [(key, facts[key], value) for key, value in wanted.items()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordsError(
            f"{directory}: not a readable checkpoint of the tinker backend ({error}); use an earlier one"
        ) from error
    for key, found, value in pairs:
        if found != value:
            raise RecordsError(
                f"{directory}: this checkpoint's {key} is {found!r}, the run's is {value!r}; "
                "resume with the configuration that wrote it"
            )
    return state
