"""Passes over the data of an update: in parts that a request can hold, each billed and under a permit."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from retrain.backends.metering import Meter
from retrain.backends.tinker.billing import billed, scored, trained
from retrain.backends.tinker.calls import Calls
from retrain.backends.tinker.state import Update
from retrain.backends.tinker.wire import UpdateOutcome

if TYPE_CHECKING:
    from tinker import TrainingClient
    from tinker.types import Datum, ForwardBackwardOutput


class Passes:
    """One run's passes through a training client."""

    def __init__(self, calls: Calls, meter: Meter) -> None:
        self._calls, self._meter = calls, meter

    async def forward(self, training: TrainingClient, update: Update) -> Sequence[Mapping[str, Any]]:
        """Return the API's output for each datum, without a gradient."""
        outputs: list[Mapping[str, Any]] = []
        for part in update.parts_for(training):
            passed = await self._calls.once("forward", partial(self._scored, training, part, update))
            outputs += passed.loss_fn_outputs
        return outputs

    async def step(self, training: TrainingClient, update: Update) -> UpdateOutcome:
        """Take an optimizer step."""
        *before, last = update.parts_for(training)
        differentiate = partial(self._differentiated, training, update)
        passes = [await self._calls.once("update", partial(differentiate, part)) for part in before]
        end, step = await self._calls.pair(
            "update", lambda: differentiate(last), lambda: training.optim_step(update.adam)
        )
        return UpdateOutcome.of([*passes, end], step)

    def _scored(
        self, training: TrainingClient, part: list[Datum], update: Update
    ) -> Awaitable[ForwardBackwardOutput]:
        tokens = scored(part)
        call = partial(training.forward, part, update.loss.name)
        return billed(self._meter, tokens, call, lambda _: tokens)

    def _differentiated(
        self, training: TrainingClient, update: Update, part: list[Datum]
    ) -> Awaitable[ForwardBackwardOutput]:
        tokens = trained(part)
        call = partial(training.forward_backward, part, update.loss.name, update.loss.config or None)
        return billed(self._meter, tokens, call, lambda _: tokens)
