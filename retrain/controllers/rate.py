"""Decides who must wait so that samples produced and batches consumed keep one ratio.

Pure accounting for `retrain.pipeline`: no clock, no threads. The pace is Melissa's rate limiter:
samples per batch = nb_time_steps / rate_limit_speed_batch_per_sim. Every comparison is made on
running totals, so waiting errors never add up to a drift.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

from retrain.config.flow import is_count, is_positive

JsonState: TypeAlias = dict[str, float | int | bool]

TOLERANCE = 1e-9  # samples; shares of a batch such as 1/3 do not add up exactly in floating point


@dataclass(slots=True)
class RateAccount:
    """Counts samples and batches, and says whether production or consumption may go on.

    Until `watermark` samples are there production is free and consumption waits. Then the
    watermark's samples pay for the first batch (as far as they go), and counting starts:
    `balance` = samples counted - samples_per_batch x batches consumed. A batch needs a balance of
    one batch; production waits once the balance covers the batches asked for. So the balance stays
    in [0, samples_per_batch + size of one report), and the ratio over k batches is off by at most
    that / (k x samples_per_batch).

    Raises:
        ValueError: the pace is not positive and finite (None or 0 is off), or the watermark is negative.
    """

    samples_per_batch: float | None
    watermark: int = 0
    produced: int = 0  # samples, over the whole run
    consumed: float = 0.0  # nominal batches, over the whole run
    discarded: int = 0  # samples that nobody trained on
    finished: bool = False  # nothing more will be produced
    counted: int = 0
    paid: float = 0.0
    warming: int = 0  # samples until counting starts
    started: bool = False

    def __post_init__(self) -> None:
        self.samples_per_batch = self.samples_per_batch or None
        if self.samples_per_batch is not None and not is_positive(self.samples_per_batch):
            raise ValueError(
                f"samples_per_batch: got {self.samples_per_batch!r}; needs to be positive; 0 or None is off"
            )
        if not is_count(self.watermark, 0):
            raise ValueError(f"watermark: got {self.watermark!r}; needs a whole number of at least 0")
        self.started = self.started or self.watermark == 0

    @property
    def balance(self) -> float:
        """Samples that are there beyond what the batches consumed so far cost; 0 if there is no pace."""
        if self.samples_per_batch is None:
            return 0.0
        return self.counted - self.paid * self.samples_per_batch

    @property
    def ratio(self) -> float | None:
        """Samples per batch since counting started over the target; None before a batch or without a pace."""
        if self.samples_per_batch is None or self.paid == 0:
            return None
        return self.counted / (self.paid * self.samples_per_batch)

    def may_produce(self, *, asked: float = 1.0, starved: bool = False) -> bool:
        """Whether samples may come in.

        Args:
            asked: batches that training asks for; at least one is always allowed for.
            starved: the buffer cannot serve the batch asked for, whatever the pace says (a reservoir
                whose samples got stale); refilling it goes first.
        """
        free = self.finished or not self.started or self.samples_per_batch is None
        return free or starved or not self._covers(max(1.0, asked))

    def may_consume(self, batches: float = 1.0, *, full: bool = False) -> bool:
        """Whether `batches` may be taken; a `full` buffer lets nothing in, so it goes first."""
        if self.finished:
            return True
        return self.started and (full or self.samples_per_batch is None or self._covers(batches))

    def add(self, samples: int) -> None:
        """Count samples that came in."""
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
        """Count batches that were consumed."""
        self.consumed += batches
        self.paid += batches

    def discard(self, samples: int) -> None:
        """Take back samples that were dropped unused: they pay for no batch."""
        self.discarded += samples
        if self.started:
            self.counted -= samples
        else:
            self.warming -= samples

    def restart(self) -> None:
        """Count afresh from an empty buffer, waiting for the watermark again; totals stay."""
        self.counted, self.paid, self.warming = 0, 0.0, 0
        self.started, self.finished = self.watermark == 0, False

    def state_dict(self) -> JsonState:
        """Return all counts as JSON-able data; the settings are not part of it."""
        return {key: getattr(self, key) for key in _STATE}

    def load_state_dict(self, state: Mapping[str, float | int | bool]) -> None:
        """Go on from what `state_dict` gave."""
        for key in _STATE:
            setattr(self, key, state[key])

    def _covers(self, batches: float) -> bool:
        return self.balance >= batches * (self.samples_per_batch or 0.0) - TOLERANCE


_SETTINGS = ("samples_per_batch", "watermark")
_STATE = tuple(field.name for field in fields(RateAccount) if field.name not in _SETTINGS)
