"""What the API bills for each kind of call, and updates, with the passes over their data.

A pass over an update's data is made in parts that a request can hold, each billed and under a permit.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from retrain.backends.tinker.calls import ApiCalls
from retrain.backends.tinker.wire import ApiLoss
from retrain.records.spending import Tokens

if TYPE_CHECKING:
    from tinker import TrainingClient
    from tinker.types import (
        AdamParams,
        Datum,
        ForwardBackwardOutput,
        LossFnOutput,
        OptimStepResponse,
        SampleResponse,
    )

BYTES_PER_TOKEN = 24  # in a request: input, target, log-probability, advantage, ratio mask


def sampling(prompt: int, rollouts: int, max_tokens: int) -> Tokens:
    """Return what sampling a group is billed at most, given the prompt's tokens."""
    return Tokens(prompt, (rollouts - 1) * prompt, rollouts * max_tokens)


def sampled(prompt: int, response: SampleResponse) -> Tokens:
    """Return what a response is billed: reading the prompt once, but for what was cached, and each token."""
    hits = int(getattr(response, "prompt_cache_hit_tokens", 0))
    others = (len(response.sequences) - 1) * prompt
    return Tokens(prompt - hits, hits + others, sum(len(one.tokens) for one in response.sequences))


def tokens_of(data: Sequence[Datum]) -> int:
    """Return how many tokens a pass over data reads."""
    return sum(int(datum.model_input.length) for datum in data)


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
        most, most_bytes = limits.fwdbwd_max_chunk_len, limits.fwdbwd_max_chunk_bytes_count
        parts: list[list[Datum]] = [[]]
        size = 0
        for datum in self.data:
            datum_bytes = BYTES_PER_TOKEN * tokens_of([datum])
            if parts[-1] and (len(parts[-1]) == most or size + datum_bytes > most_bytes):
                parts.append([])
                size = 0
            parts[-1].append(datum)
            size += datum_bytes
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class UpdateOutcome:
    """The API's response to an update."""

    outputs: Sequence[LossFnOutput]  # one per datum
    metrics: dict[str, float]

    @classmethod
    def of(cls, passes: Sequence[ForwardBackwardOutput], step: OptimStepResponse) -> UpdateOutcome:
        """Join the responses to the parts; sums are added up, and one that a part lacks is not known."""
        outputs = [output for answer in passes for output in answer.loss_fn_outputs]
        reported = [answer.metrics or {} for answer in passes]  # some servers report none
        metrics = {name: value for name, value in reported[-1].items() if not name.endswith(":sum")}
        in_all = set(reported[-1]).intersection(*reported) - metrics.keys()
        metrics |= {name: sum(one[name] for one in reported) for name in in_all}
        return cls(outputs, metrics | (step.metrics or {}))


async def pass_forward(calls: ApiCalls, training: TrainingClient, update: Update) -> Sequence[LossFnOutput]:
    """Return the API's output for each datum of an update, without a gradient."""
    outputs: list[LossFnOutput] = []
    for part in update.parts_for(training):
        call = partial(training.forward, part, update.loss.name)
        passed = await calls.once("forward", partial(calls.billed, Tokens(tokens_of(part)), call))
        outputs += passed.loss_fn_outputs
    return outputs


async def take_step(calls: ApiCalls, training: TrainingClient, update: Update) -> UpdateOutcome:
    """Take an optimizer step."""

    def differentiate(part: list[Datum]) -> Awaitable[ForwardBackwardOutput]:
        call = partial(training.forward_backward, part, update.loss.name, update.loss.config or None)
        return calls.billed(Tokens(train=tokens_of(part)), call)

    *before, last = update.parts_for(training)
    passes = [await calls.once("update", partial(differentiate, part)) for part in before]
    end, step = await calls.pair(
        "update", lambda: differentiate(last), lambda: training.optim_step(update.adam)
    )
    return UpdateOutcome.of([*passes, end], step)
