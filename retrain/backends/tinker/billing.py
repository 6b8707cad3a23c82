"""Counts what the API bills for a call: known once its result is there, else at most."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from retrain.backends.metering import NOTHING, Meter
from retrain.backends.tinker.faults import FAULTS, is_refused_unbilled
from retrain.records.spending import Tokens

if TYPE_CHECKING:
    from tinker.types import Datum, SampleResponse

T = TypeVar("T")


async def billed(
    meter: Meter, at_most: Tokens, call: Callable[[], Awaitable[T]], count: Callable[[T], Tokens]
) -> T:
    """Make a call, and count what it was billed; nothing if the API refused it."""
    with meter.call(at_most) as made:
        try:
            result = await call()
        except FAULTS as error:
            made.billed = NOTHING if is_refused_unbilled(error) else None
            raise
        made.billed = count(result)
    return result


def sampling(prompt: int, rollouts: int, max_tokens: int) -> Tokens:
    """Return what sampling a group is billed at most, given the prompt's tokens."""
    return Tokens(prompt, (rollouts - 1) * prompt, rollouts * max_tokens)


def sampled(prompt: int, response: SampleResponse) -> Tokens:
    """Return what a response is billed: reading the prompt once, but for what was cached, and each token."""
    hits = int(getattr(response, "prompt_cache_hit_tokens", 0))
    others = (len(response.sequences) - 1) * prompt
    return Tokens(prompt - hits, hits + others, sum(len(one.tokens) for one in response.sequences))


def scored(data: Sequence[Datum]) -> Tokens:
    """Return what a forward pass over data is billed: it is a prompt that is read."""
    return Tokens(sum(int(datum.model_input.length) for datum in data))


def trained(data: Sequence[Datum]) -> Tokens:
    """Return what one pass over data, forward and backward, is billed."""
    return Tokens(train=sum(int(datum.model_input.length) for datum in data))
