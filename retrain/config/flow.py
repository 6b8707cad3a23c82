"""How samples flow from production to training, and which settings are consistent.

Rejects, before anything starts, settings that would deadlock or could never keep their pace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retrain.config.schema import Config

ROUNDED = 1e-5  # relative: a speed may be written with six digits, as messages do
BUFFERS = ("fifo", "firo", "reservoir")
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

    def problems(self) -> list[str]:
        """List settings that are invalid, deadlock or cannot keep the pace: key, value, reason."""
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
            if not is_count(getattr(self, key), low)
        ]
        if self.buffer not in BUFFERS:
            found.append(f"buffer: got {self.buffer!r}; known: {', '.join(BUFFERS)}")
        if self.samples_per_batch is not None and not is_positive(self.samples_per_batch):
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
                f"batch_size = {self.batch_size}; otherwise the buffer runs empty or full, and the pace is "
                "lost or both sides deadlock; a reservoir takes other values"
            )
        if self.buffer == "reservoir" and pace > self.batch_size:
            found.append(
                f"samples_per_batch: got {pace:g}; training sees at most batch_size = {self.batch_size} "
                "samples of a reservoir per batch, so unseen samples would fill it, and the pace is lost or "
                "both sides deadlock"
            )
        if self.buffer == "reservoir" and max(self.watermark, pace) < self.batch_size:
            found.append(
                f"watermark: got {self.watermark}; needs at least batch_size = {self.batch_size}, because at "
                f"samples_per_batch = {pace:g} production would stop before the first batch is complete"
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
            f"first {fresh} would be stale before training reads them"
            for key, queued in waiting.items()
            if queued > fresh
        ]


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
    )


def flow_problems(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Iterate over the problems of a run's flow: the key, and why."""
    settings, pressure = flow_settings(config), config.backpressure
    if settings is None:
        return
    if pressure.enabled and pressure.control == "microbatch":
        what = (
            'got "microbatch", which has no effect on asynchronous sampling, whose units [rate_limiter] '
            'sizes; use "batch", or rate_limiter.max_staleness = 0'
        )
        yield ("backpressure", "control"), what
    for problem in settings.problems():
        key, what = problem.split(": ", 1)
        if key == "samples_per_batch":
            what = _speed_problem(config, settings, what)
        yield KEYS.get(key, ("rate_limiter", key)), what


def _speed_problem(config: Config, settings: FlowSettings, what: str) -> str:
    table = config.rate_limiter
    if table.buffer == "reservoir":
        return f"samples_per_batch = nb_time_steps / rate_limit_speed_batch_per_sim: {what}"
    unit, batch = settings.unit_size, config.training.batch_size
    return (
        f"got {table.rate_limit_speed_batch_per_sim:g}; a {table.buffer} buffer reads each sample once, "
        f"so it needs {unit / batch:g} (nb_time_steps = {unit} / training.batch_size = {batch}), or 0 for no "
        'pace; [rate_limiter].buffer = "reservoir" takes other values'
    )


def is_positive(value: object) -> bool:
    """Whether a value is a finite number above 0; a boolean is not a number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and value > 0


def is_count(value: object, least: int) -> bool:
    """Whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
