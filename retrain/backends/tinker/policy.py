"""What a remote policy is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker import SamplingClient
from tinker.types import AdamParams, Datum, ForwardBackwardOutput, OptimStepResponse

from retrain.backends.tinker.losses import ApiLoss

BYTES_PER_TOKEN = 24  # of a request: input, target, log-probability, advantage, ratio mask


@dataclass(frozen=True, slots=True)
class Model:
    """What is trained."""

    name: str
    rank: int
    seed: int  # of the fresh adapter; 0 or more
    run: str  # for people who look at the API's console
    base_url: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """A saved policy; without a path, the fresh one."""

    path: str
    version: int


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """All that one optimizer step sends."""

    data: list[Datum]
    loss: ApiLoss
    adam: AdamParams

    def parts(self, most_datums: int, most_bytes: int) -> list[list[Datum]]:
        """Cut the data so that the SDK sends each part as one request, not several at once."""
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
    """What the API answered to an update."""

    outputs: Sequence[Mapping[str, Any]]  # one per datum
    metrics: dict[str, float]

    @classmethod
    def of(cls, passes: Sequence[ForwardBackwardOutput], step: OptimStepResponse) -> Outcome:
        """Join the answers to the parts; the API's sums are added up."""
        outputs = [output for answer in passes for output in answer.loss_fn_outputs]
        metrics = {**passes[-1].metrics, **(step.metrics or {})}
        sums = {name for name in passes[-1].metrics if name.endswith(":sum")}
        metrics |= {name: sum(answer.metrics[name] for answer in passes) for name in sums}
        return cls(outputs, metrics)


@dataclass(frozen=True, slots=True, eq=False)
class Sampler:
    """A sampling client and the policy version that it samples from."""

    client: SamplingClient
    version: int
