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

JsonState: TypeAlias = dict[str, float | int | bool]

TOLERANCE = 1e-9  # samples; shares of a batch such as 1/3 do not add up exactly in floating point
BUFFERS = ("fifo", "firo", "reservoir")


def samples_per_batch(
    nb_time_steps: float, rate_limit_speed_batch_per_sim: float | None = None
) -> float | None:
    """Give the pace: samples to produce for each batch consumed, or None when the limiter is off.

    Args:
        nb_time_steps: samples that one production unit yields (for rollouts: those of one sampling call).
        rate_limit_speed_batch_per_sim: batches to train on per production unit; 0 or None is off.

    Raises:
        ValueError: neither off nor a positive finite number.
    """
    speed = rate_limit_speed_batch_per_sim
    if speed is None or (speed == 0 and not isinstance(speed, bool)):
        return None
    for name, value in (("nb_time_steps", nb_time_steps), ("rate_limit_speed_batch_per_sim", speed)):
        if not _is_positive(value):
            raise ValueError(f"{name}: got {value!r}; needs a positive finite number (a speed of 0 is off)")
    return nb_time_steps / speed


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """How samples flow from production to training; counts are samples unless said otherwise."""

    batch_size: int  # samples per nominal batch
    capacity: int  # most samples that the buffer holds
    buffer: str = "fifo"
    threshold: int = 0  # firo: samples that stay behind, so that reading is random among at least these
    samples_per_batch: float | None = None  # the pace; batches of another size count in proportion
    watermark: int = 0  # training and counting start once the buffer holds this many
    max_staleness: int | None = None  # in policy versions; None: any age
    unit_size: int = 1  # samples that one production unit is expected to yield

    def problems(self) -> list[str]:
        """List what makes these settings wrong, deadlock or never hold the pace: key, value, reason."""
        return self._wrong_values() or [
            *self._overflows(),
            *(self._pace_conflicts() if self.samples_per_batch is not None else []),
            *(self._age_conflicts() if self.max_staleness is not None else []),
        ]

    def _wrong_values(self) -> list[str]:
        least = {"batch_size": 1, "capacity": 1, "threshold": 0, "watermark": 0, "unit_size": 1}
        if self.max_staleness is not None:
            least["max_staleness"] = 0
        found = [
            f"{key}: got {getattr(self, key)!r}; needs a whole number of at least {low}"
            for key, low in least.items()
            if not _is_count(getattr(self, key), low)
        ]
        if self.buffer not in BUFFERS:
            found.append(f"buffer: got {self.buffer!r}; known: {', '.join(BUFFERS)}")
        if self.samples_per_batch is not None and not _is_positive(self.samples_per_batch):
            found.append(
                f"samples_per_batch: got {self.samples_per_batch!r}; needs a positive number, or None for off"
            )
        if self.threshold and self.buffer != "firo":
            found.append(f"threshold: got {self.threshold}; only the firo buffer has one")
        return found

    def _overflows(self) -> list[str]:
        found = []
        if self.watermark > self.capacity:
            found.append(
                f"watermark: got {self.watermark}; the buffer holds at most capacity = {self.capacity}, "
                "so training would never start"
            )
        if self.batch_size + self.threshold > self.capacity:
            found.append(
                f"capacity: got {self.capacity}; needs at least batch_size + threshold = "
                f"{self.batch_size + self.threshold}, or no batch could ever be read"
            )
        return found

    def _pace_conflicts(self) -> list[str]:
        pace = self.samples_per_batch or 0.0
        found = []
        if self.buffer != "reservoir" and pace != self.batch_size:
            found.append(
                f"samples_per_batch: got {pace:g}; {self.buffer} reads each sample once, so it must equal "
                f"batch_size = {self.batch_size}, or the buffer runs empty or full, and the pace is lost or "
                "both sides wait for ever; a reservoir may read samples more than once"
            )
        if self.buffer == "reservoir" and pace > self.batch_size:
            found.append(
                f"samples_per_batch: got {pace:g}; training sees at most batch_size = {self.batch_size} "
                "samples of a reservoir per batch, so unseen ones would fill it, and the pace is lost or "
                "both sides wait for ever"
            )
        if self.buffer == "reservoir" and max(self.watermark, pace) < self.batch_size:
            found.append(
                f"watermark: got {self.watermark}; needs at least batch_size = {self.batch_size}, because at "
                f"samples_per_batch = {pace:g} production would stop before the first batch is there"
            )
        if self.threshold and self.watermark < self.threshold + self.batch_size:
            found.append(
                f"watermark: got {self.watermark}; needs at least threshold + batch_size = "
                f"{self.threshold + self.batch_size}, because the pace keeps the buffer near its watermark"
            )
        return found

    def _age_conflicts(self) -> list[str]:
        fresh = self.batch_size * ((self.max_staleness or 0) + 1)
        waiting = {"unit_size": self.unit_size}
        if self.buffer != "reservoir":  # a reservoir's samples do not queue
            waiting |= {
                "watermark": self.watermark,
                "threshold": self.threshold and self.threshold + self.batch_size,
            }
        return [
            f"{key}: got {getattr(self, key)}; with max_staleness = {self.max_staleness}, samples behind the "
            f"first {fresh} are stale before their turn"
            for key, queued in waiting.items()
            if queued > fresh
        ]


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
        if self.samples_per_batch is not None and not _is_positive(self.samples_per_batch):
            raise ValueError(
                f"samples_per_batch: got {self.samples_per_batch!r}; needs to be positive; 0 or None is off"
            )
        if not _is_count(self.watermark, 0):
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
        """Say whether samples may come in.

        Args:
            asked: batches that training asks for; at least one is always allowed for.
            starved: the buffer cannot serve the batch asked for, whatever the pace says (a reservoir
                whose samples got stale); refilling it goes first.
        """
        free = self.finished or not self.started or self.samples_per_batch is None
        return free or starved or not self._covers(max(1.0, asked))

    def may_consume(self, batches: float = 1.0, *, full: bool = False) -> bool:
        """Say whether `batches` may be taken; a `full` buffer lets nothing in, so it goes first."""
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
        """Give all counts as JSON-able data; the settings are not part of it."""
        return {key: getattr(self, key) for key in _STATE}

    def load_state_dict(self, state: Mapping[str, float | int | bool]) -> None:
        """Go on from what `state_dict` gave."""
        for key in _STATE:
            setattr(self, key, state[key])

    def _covers(self, batches: float) -> bool:
        return self.balance >= batches * (self.samples_per_batch or 0.0) - TOLERANCE


_SETTINGS = ("samples_per_batch", "watermark")
_STATE = tuple(field.name for field in fields(RateAccount) if field.name not in _SETTINGS)


def _is_positive(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value > 0


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
