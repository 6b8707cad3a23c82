"""How samples flow from production to training, and which settings are consistent.

Rejects, before anything starts, settings that would deadlock or could never keep their pace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrain.base.errors import Problem
from retrain.config.keys import Table, Tables

if TYPE_CHECKING:
    from retrain.config.schema import Config

ROUNDED = 1e-5  # relative: a speed may be written with six digits, as messages do
KEYS = {  # the TOML keys of fields with another name in `FlowSettings`
    "batch_size": ("training", "batch_size"),
    "samples_per_batch": ("rate_limiter", "rate_limit_speed_batch_per_sim"),
    "unit_size": ("rate_limiter", "nb_time_steps"),
}


def samples_per_batch(
    nb_time_steps: float, rate_limit_speed_batch_per_sim: float | None = None
) -> float | None:
    """Return the pace: samples to produce for each batch consumed, or None when the limiter is off.

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
        if not is_positive(value):
            raise ValueError(f"{name}: got {value!r}; needs a positive finite number (a speed of 0 is off)")
    return nb_time_steps / speed


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """How samples flow from production to training; counts are in samples unless noted."""

    batch_size: int  # samples per nominal batch
    capacity: int  # of the buffer
    buffer: str = "fifo"
    threshold: int = 0  # firo: samples always left in the buffer, so that reads are random
    samples_per_batch: float | None = None  # the pace; batches of another size count in proportion
    watermark: int = 0  # training and counting start once the buffer holds this many
    max_staleness: int | None = None  # in policy versions; None: any age
    unit_size: int = 1  # samples that one production unit is expected to yield
    steps: int | None = None  # batches of the whole run, after which none is taken; None: no end

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Iterate over keys whose settings deadlock or cannot keep the pace, each with the reason."""
        if self.threshold and self.buffer != "firo":
            yield "threshold", f"got {self.threshold}; only the firo buffer has one"
        if self.watermark > self.capacity:
            limit = f"the buffer holds at most capacity = {self.capacity}"
            yield "watermark", f"got {self.watermark}; {limit}, so training would never start"
        if (least := self.batch_size + self.threshold) > self.capacity:
            needs = f"needs at least batch_size + threshold = {least}, or no batch could ever be read"
            yield "capacity", f"got {self.capacity}; {needs}"
        if self.samples_per_batch is not None:
            yield from self._pace_conflicts(self.samples_per_batch)
        if self.max_staleness is not None:
            fresh = self.batch_size * (self.max_staleness + 1)
            waiting = {"unit_size": self.unit_size}
            if self.buffer != "reservoir":  # a reservoir's samples do not queue
                waiting["watermark"] = self.watermark
                waiting["threshold"] = self.threshold and self.threshold + self.batch_size
            stale = f"samples behind the first {fresh} would be stale before training reads them"
            for key in (key for key, queued in waiting.items() if queued > fresh):
                yield key, f"got {getattr(self, key)}; with max_staleness = {self.max_staleness}, {stale}"

    def _pace_conflicts(self, pace: float) -> Iterator[tuple[str, str]]:
        if self.buffer != "reservoir" and pace != self.batch_size:
            yield (
                "samples_per_batch",
                f"got {pace:g}; {self.buffer} reads each sample once, so it must equal batch_size = "
                f"{self.batch_size}; otherwise the buffer runs empty or full, and the pace is lost or both "
                "sides deadlock; a reservoir takes other values",
            )
        if self.buffer == "reservoir" and pace > self.batch_size:
            yield (
                "samples_per_batch",
                f"got {pace:g}; training sees at most batch_size = {self.batch_size} samples of a reservoir "
                "per batch, so unseen samples would fill it, and the pace is lost or both sides deadlock",
            )
        if self.buffer == "reservoir" and max(self.watermark, pace) < self.batch_size:
            yield (
                "watermark",
                f"got {self.watermark}; needs at least {self.batch_size}, a whole batch: with {pace:g} "
                "samples produced per batch, production would stop before the first batch is complete",
            )
        if self.threshold and self.watermark < self.threshold + self.batch_size:
            yield (
                "watermark",
                f"got {self.watermark}; needs at least threshold + batch_size = "
                f"{self.threshold + self.batch_size}, because the pace keeps the buffer near its watermark",
            )


def overlapping(tables: Tables) -> Table:
    """Return a file's tables where a speed without `max_staleness` overlaps sampling and training by one."""
    limiter = tables.get("rate_limiter")
    if not isinstance(limiter, Mapping) or "max_staleness" in limiter:
        return dict(tables)
    if not is_positive(limiter.get("rate_limit_speed_batch_per_sim")):
        return dict(tables)
    return {**tables, "rate_limiter": {**limiter, "max_staleness": 1}}


def flow_settings(config: Config) -> FlowSettings | None:
    """Return the flow of prompts; None if sampling and training alternate (max_staleness = 0).

    An item is one prompt's group; the nominal batch is the largest that back pressure may ask for, at
    the pace of `training.batch_size`.
    """
    table, pressure = config.rate_limiter, config.backpressure
    if table.max_staleness == 0:
        return None
    batch = config.training.batch_size
    largest = max(batch, pressure.max_batch_size) if pressure.enabled else batch
    unit = table.nb_time_steps or batch
    pace = samples_per_batch(unit, table.rate_limit_speed_batch_per_sim)
    if table.buffer != "reservoir" and pace is not None and math.isclose(pace, batch, rel_tol=ROUNDED):
        pace = batch  # exactly, or the difference would add up
    return FlowSettings(
        batch_size=largest,
        capacity=table.capacity or 2 * max(table.watermark, largest + table.threshold, unit),
        buffer=table.buffer,
        threshold=table.threshold,
        samples_per_batch=pace * largest / batch if pace is not None else None,
        watermark=table.watermark,
        max_staleness=table.max_staleness,
        unit_size=unit,
        steps=config.training.max_steps,
    )


def flow_problems(config: Config) -> Iterator[Problem]:
    """Iterate over the problems of a run's flow."""
    settings, pressure = flow_settings(config), config.backpressure
    if settings is None:
        return
    if pressure.enabled and pressure.control == "microbatch":
        what = (
            'got "microbatch", which has no effect on asynchronous sampling, whose units [rate_limiter] '
            'sizes; use "batch", or rate_limiter.max_staleness = 0'
        )
        yield Problem(("backpressure", "control"), what)
    if settings.buffer == "reservoir" and (refill := config.data.refill) != "none":
        what = (
            f'got "{refill}" with rate_limiter.buffer = "reservoir", which reads dropped groups again and '
            'again; use buffer = "fifo" or "firo", or refill = "none"'
        )
        yield Problem(("data", "refill"), what)
    for key, what in settings.conflicts():
        if key == "samples_per_batch":
            unit, batch, table = settings.unit_size, config.training.batch_size, config.rate_limiter
            what = f"got {table.rate_limit_speed_batch_per_sim:g}"
            if table.buffer == "reservoir":
                what += (
                    f", which is nb_time_steps = {unit} / that speed = "
                    f"{unit / table.rate_limit_speed_batch_per_sim:g} samples per batch; it needs at least "
                    f"{unit / batch:g} (nb_time_steps / training.batch_size = {batch}), or 0 for no pace: "
                    "slower training would leave unseen samples that fill the buffer"
                )
            else:
                what += (
                    f"; a {table.buffer} buffer reads each sample once, so it needs {unit / batch:g} "
                    f"(nb_time_steps = {unit} / training.batch_size = {batch}), or 0 for no pace; "
                    '[rate_limiter].buffer = "reservoir" takes larger values'
                )
        elif key == "watermark" and settings.buffer == "reservoir" and pressure.enabled:
            what = f"{what}; the largest batch is [backpressure].max_batch_size = {settings.batch_size}"
        yield Problem(KEYS.get(key, ("rate_limiter", key)), what)


def is_positive(value: object) -> bool:
    """Whether a value is a finite number above 0; a boolean is not a number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value > 0


def is_count(value: object, least: int) -> bool:
    """Whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
