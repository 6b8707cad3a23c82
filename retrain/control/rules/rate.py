"""Rate limiter: keep a fixed ratio of samples produced to batches consumed.

Pure accounting for `retrain.trainer.pipeline`: no clock, no threads. The ratio is that of Melissa's rate
limiter: samples per batch = nb_time_steps / rate_limit_speed_batch_per_sim. Every comparison uses running
totals, so errors do not accumulate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from retrain.config.flow import is_count, is_positive
from retrain.control.rules import StateDict, require

SETTINGS = 2  # first fields of the account, which are not part of its state
TOLERANCE = 1e-9  # samples; fractions of a batch such as 1/3 do not sum exactly in floating point


@dataclass(slots=True)
class RateAccount:
    """Count samples and batches, and decide whether production or consumption may continue.

    Until `watermark` samples have arrived, production is unlimited and consumption waits. Then the
    watermark's samples are credited to the first batch (up to its cost), and counting starts:
    `balance` = samples counted - samples_per_batch x batches consumed. A batch needs a balance of
    one batch; production waits once the balance covers the batches requested. So the balance stays
    in [0, samples_per_batch + size of one report), and the ratio over k batches is off by at most
    that / (k x samples_per_batch).

    Raises:
        ValueError: `samples_per_batch` is negative or not finite (None or 0 turns the limit off), or the
            watermark is negative.
    """

    samples_per_batch: float | None
    watermark: int = 0
    produced: int = 0  # samples, over the whole run
    consumed: float = 0.0  # nominal batches, over the whole run
    discarded: int = 0  # samples dropped without training on them
    finished: bool = False  # no more samples will be produced
    counted: int = 0
    paid: float = 0.0
    warming: int = 0  # samples until counting starts
    started: bool = False

    def __post_init__(self) -> None:
        self.samples_per_batch = self.samples_per_batch or None
        is_limit = self.samples_per_batch is None or is_positive(self.samples_per_batch)
        require("samples_per_batch", self.samples_per_batch, is_limit, "at least 0 (0: no limit)")
        require("watermark", self.watermark, is_count(self.watermark, 0), "a whole number of at least 0")
        self.started = self.started or self.watermark == 0

    @property
    def balance(self) -> float:
        """Samples counted minus the cost of the batches consumed; 0 without a limit."""
        if self.samples_per_batch is None:
            return 0.0
        return self.counted - self.paid * self.samples_per_batch

    @property
    def ratio(self) -> float | None:
        """Measured over configured samples per batch; None before the first batch or without a limit."""
        if self.samples_per_batch is None or self.paid == 0:
            return None
        return self.counted / (self.paid * self.samples_per_batch)

    def may_produce(self, *, asked: float = 1.0, starved: bool = False) -> bool:
        """Whether samples may be produced, if training requests `asked` batches (at least one).

        Always if it is `starved`: the buffer cannot serve the batch, because a reservoir's samples are stale.
        """
        free = self.finished or not self.started or self.samples_per_batch is None
        return free or starved or not self._covers(max(1.0, asked))

    def may_consume(self, batches: float = 1.0, *, full: bool = False) -> bool:
        """Whether `batches` may be taken; always if the buffer is `full`, which blocks production."""
        if self.finished:
            return True
        return self.started and (full or self.samples_per_batch is None or self._covers(batches))

    def lacking(self, batches: float = 1.0) -> int:
        """Return how many more samples `batches` need, once counting has started."""
        if self.finished or not self.started or self.samples_per_batch is None:
            return 0
        return max(0, math.ceil(batches * self.samples_per_batch - self.balance - TOLERANCE))

    def add(self, samples: int) -> None:
        self.produced += samples
        if self.started:
            self.counted += samples
            return
        self.warming += samples
        if self.warming >= self.watermark:
            self.started = True
            credit = min(self.watermark, math.ceil(self.samples_per_batch or 0))
            self.counted = credit + self.warming - self.watermark

    def take(self, batches: float = 1.0) -> None:
        self.consumed += batches
        self.paid += batches

    def discard(self, samples: int) -> None:
        """Subtract samples that were dropped unused; they are not credited to a batch."""
        self.discarded += samples
        if self.started:
            self.counted -= samples
        else:
            self.warming -= samples

    def restart(self) -> None:
        """Restart counting with an empty buffer, and wait for the watermark again; totals are kept."""
        self.counted, self.paid, self.warming = 0, 0.0, 0
        self.started, self.finished = self.watermark == 0, False

    def state_dict(self) -> StateDict:
        """Return all counts as JSON-able data; the settings are not part of it."""
        return {count.name: getattr(self, count.name) for count in fields(self)[SETTINGS:]}

    def load_state_dict(self, state: StateDict) -> None:
        for count in fields(self)[SETTINGS:]:
            setattr(self, count.name, state[count.name])

    def _covers(self, batches: float) -> bool:
        return self.balance >= batches * (self.samples_per_batch or 0.0) - TOLERANCE
