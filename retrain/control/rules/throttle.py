"""Training throttle: four levels by machine load, with hysteresis and dwell time against flapping.

Input is a load and the time, output a level and its reason; it neither measures nor waits.
A higher load restricts at once; a lower load relaxes only below a margin and after a dwell time.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from retrain.control.rules import require


@functools.total_ordering
class ThrottleLevel(enum.Enum):
    """Restriction of training; a greater level is more restrictive."""

    FULL = "full"
    REDUCED = "reduced"
    MINIMAL = "minimal"
    PAUSED = "paused"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, ThrottleLevel):
            return NotImplemented
        return LEVELS[self].from_load < LEVELS[other].from_load


@dataclass(frozen=True, slots=True)
class Allowance:
    """Resources that a level allows to training, from this load upwards."""

    zone: str  # name of the load range up to the next level
    from_load: float
    batch_multiplier: float
    num_workers: int
    gpu_fraction: float
    check_interval_s: float


LEVELS: Mapping[ThrottleLevel, Allowance] = {
    ThrottleLevel.FULL: Allowance("idle", 0.0, 1.0, 4, 1.0, 30.0),
    ThrottleLevel.REDUCED: Allowance("moderate", 0.3, 0.5, 2, 0.5, 15.0),
    ThrottleLevel.MINIMAL: Allowance("busy", 0.6, 0.25, 1, 0.25, 10.0),
    ThrottleLevel.PAUSED: Allowance("saturated", 0.85, 0.0, 0, 0.0, 5.0),
}


@dataclass(frozen=True, slots=True)
class Load:
    """One reading: the fraction of each resource in use, above 1 as of queued work; and what is unknown."""

    parts: Mapping[str, float] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()  # one message per resource that exists but could not be read

    @property
    def value(self) -> float | None:
        """Fraction in [0, 1] of the most used resource; None if nothing was read."""
        return min(1.0, max(self.parts.values())) if self.parts else None

    @property
    def is_known(self) -> bool:
        return bool(self.parts) and not self.unknown


@dataclass(frozen=True, slots=True)
class ThrottleState:
    """The level chosen for one reading, with the reason.

    If the load is unknown, `is_known` is False, `level` is at least the rule's `on_unknown`, so that a
    training loop can always act on it, and `reason` names what could not be read.
    """

    level: ThrottleLevel
    reason: str
    reading: Load = field(default_factory=Load)

    @property
    def load(self) -> float | None:
        return self.reading.value

    fleet_load = load  # its published name

    @property
    def zone(self) -> str:
        """Name of the load range; the level may be more restrictive, by hysteresis and dwell time."""
        return "unknown" if self.load is None else LEVELS[level_for(self.load)].zone

    @property
    def is_known(self) -> bool:
        return self.reading.is_known

    @property
    def batch_multiplier(self) -> float:
        return LEVELS[self.level].batch_multiplier

    @property
    def num_workers(self) -> int:
        return LEVELS[self.level].num_workers

    @property
    def gpu_fraction(self) -> float:
        return LEVELS[self.level].gpu_fraction

    @property
    def check_interval_s(self) -> float:
        return LEVELS[self.level].check_interval_s

    @property
    def should_train(self) -> bool:
        return self.level is not ThrottleLevel.PAUSED

    def summary(self) -> str:
        """Return a one-line summary without the reason."""
        load = "unknown" if self.load is None else f"{self.load:.2f}"
        return (
            f"[{self.level.value}] batch×{self.batch_multiplier:.2f} workers={self.num_workers} "
            f"gpu={self.gpu_fraction:.0%} | fleet_load={load} zone={self.zone}"
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain data for a log; `load` is None if nothing could be read."""
        allowed = ("batch_multiplier", "num_workers", "gpu_fraction", "should_train", "check_interval_s")
        return {
            "level": self.level.value,
            **{name: getattr(self, name) for name in ("load", "is_known", *allowed, "reason")},
            "parts": dict(self.reading.parts),
        }


@dataclass(frozen=True, slots=True)
class ThrottleRule:
    """Settings of the throttle.

    Raises:
        ValueError: the hysteresis is so large that a level would never be left, or the dwell is negative.
    """

    min_level: ThrottleLevel = ThrottleLevel.FULL  # the least restrictive level
    on_unknown: ThrottleLevel = ThrottleLevel.REDUCED  # half, since an unknown load may be low or high
    hysteresis: float = 0.05  # twice the noise of a 0.25 s reading in 10 ms ticks on two cores
    dwell_s: float = 10.0  # two readings at PAUSED, the level that is most costly to leave too early

    def __post_init__(self) -> None:
        reaches_full = 0.0 <= self.hysteresis < LEVELS[ThrottleLevel.REDUCED].from_load
        needed = "to lie in [0, 0.3), or no load would reach FULL again"
        require("hysteresis", self.hysteresis, reaches_full, needed)
        require("dwell_s", self.dwell_s, self.dwell_s >= 0.0, "0 or more seconds")


@dataclass(frozen=True, slots=True)
class Held:
    """State between decisions: the level, and since when the load has allowed a less restrictive one."""

    level: ThrottleLevel
    calm_since_s: float | None = None
    calm_level: ThrottleLevel = ThrottleLevel.FULL  # most restrictive reading since then


def level_for(load: float) -> ThrottleLevel:
    """Return the level for a load; a boundary belongs to the more restrictive level."""
    return max(level for level, allowance in LEVELS.items() if load >= allowance.from_load)


def decide(load: Load, now_s: float, held: Held | None, rule: ThrottleRule) -> tuple[ThrottleState, Held]:
    """Choose the level for a reading, and return the state for the next decision.

    `now_s` is from the same monotonic clock in every call; `held` is what the last decision returned.
    """
    target = _target(load, 0.0, rule)
    if held is None or target >= held.level:
        return _state(target, load, rule), Held(target)
    eased = _target(load, rule.hysteresis, rule)
    if eased >= held.level:
        held = Held(held.level)
        return _state(held.level, load, rule, f"; held within {rule.hysteresis:g} of the boundary"), held
    calm_since_s = now_s if held.calm_since_s is None else held.calm_since_s
    calm_level = max(held.calm_level, eased)
    if now_s - calm_since_s < rule.dwell_s:
        held = Held(held.level, calm_since_s, calm_level)
        return _state(held.level, load, rule, f"; held until calm for {rule.dwell_s:g} s"), held
    return _state(calm_level, load, rule), Held(calm_level)


def _target(load: Load, margin: float, rule: ThrottleRule) -> ThrottleLevel:
    levels = [rule.min_level]
    if load.value is not None:
        levels.append(level_for(load.value + margin))
    if not load.is_known:
        levels.append(rule.on_unknown)
    return max(levels)


def _state(level: ThrottleLevel, load: Load, rule: ThrottleRule, held_because: str = "") -> ThrottleState:
    reason = "load unknown"
    if load.value is not None:
        parts = ", ".join(f"{name} {share:.2f}" for name, share in load.parts.items())
        limit = LEVELS[ThrottleLevel.PAUSED].from_load
        saturated = f", saturated from {limit:g}" if load.value >= limit else ""
        reason = f"load {max(load.parts.values()):.2f}{saturated}: {parts}"
    if not load.is_known:
        causes = "; ".join(load.unknown) or "nothing was read"
        reason += f"; unknown, so at least {rule.on_unknown.value}: {causes}"
    return ThrottleState(level, reason + held_because, load)
