"""A remote policy: its saved states and updates, and its checkpoint on disk.

A checkpoint is a JSON file with the path of the state that the API saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.backends.tinker.wire import ApiLoss
from retrain.errors import RecordsError

if TYPE_CHECKING:
    from tinker import SamplingClient
    from tinker.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse

FORMAT = 1  # of the file; increment when old ones can no longer be read
NAME = "tinker.json"

BYTES_PER_TOKEN = 24  # in a request: input, target, log-probability, advantage, ratio mask


@dataclass(frozen=True, slots=True)
class State:
    """A policy saved at the API's `path` after `version` updates; an empty path is the initial policy."""

    path: str
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """The data and settings of one optimizer step."""

    data: list[Datum]
    loss: ApiLoss
    adam: AdamParams

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
class Outcome:
    """The API's response to an update."""

    outputs: Sequence[Mapping[str, Any]]  # one per datum
    metrics: dict[str, float]

    @classmethod
    def of(cls, passes: Sequence[ForwardBackwardOutput], step: OptimStepResponse) -> Outcome:
        """Join the responses to the parts; sums are added up."""
        outputs = [output for answer in passes for output in answer.loss_fn_outputs]
        metrics = {**passes[-1].metrics, **(step.metrics or {})}
        sums = {name for name in passes[-1].metrics if name.endswith(":sum")}
        metrics |= {name: sum(answer.metrics[name] for answer in passes) for name in sums}
        return cls(outputs, metrics)


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
    """Return the saved policy.

    Raises:
        RecordsError: unreadable, or of another model.
    """
    wanted = {"format": FORMAT, "model": model, "lora_rank": rank}
    try:
        facts = json.loads((directory / NAME).read_text(encoding="utf-8"))
        state = State(str(facts["path"]), int(facts["version"]))
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
