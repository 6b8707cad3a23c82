"""The batches and statistics of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

from retrain.pipeline.buffers import Item
from retrain.pipeline.flow import Flow
from retrain.records.step_row import PipelineStats


@dataclass(frozen=True, slots=True)
class Batch(Generic[Item]):
    """The samples of one step."""

    items: tuple[Item, ...]
    ages: tuple[int, ...]  # policy versions between sampling and training, one per item
    stale: tuple[Item, ...]  # dropped because of their age since the previous batch
    wait_s: float  # training's wait for this batch

    @property
    def dropped(self) -> int:
        """How many samples were dropped because of their age since the previous batch."""
        return len(self.stale)


class Waits:
    """Sums the waits since `start`."""

    def __init__(self, clock: Callable[[], float], workers: int) -> None:
        self.producer_s = 0.0
        self.consumer_s = 0.0
        self.ages: tuple[int, ...] = ()
        self._clock = clock
        self._workers = workers
        self._started_s = clock()

    def start(self) -> None:
        """Count time from here."""
        self._started_s = self._clock()

    def stats(self, flow: Flow[Any]) -> PipelineStats:
        """Return the waits together with the flow's counts."""
        elapsed_s = max(self._clock() - self._started_s, 1e-9)
        return PipelineStats(
            ratio=flow.account.ratio,
            producer_wait_s=self.producer_s,
            consumer_wait_s=self.consumer_s,
            producer_idle_fraction=min(1.0, self.producer_s / (elapsed_s * self._workers)),
            consumer_idle_fraction=min(1.0, self.consumer_s / elapsed_s),
            sample_age_mean=sum(self.ages) / len(self.ages) if self.ages else 0.0,
            sample_age_max=max(self.ages, default=0),
            dropped=flow.stale,
            lost=flow.lost,
            outstanding=flow.ahead,
            produced=flow.account.produced,
            units=flow.units,
            batches=flow.batches,
            batches_per_unit=flow.batches / flow.units if flow.units else None,
        )
