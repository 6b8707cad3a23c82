"""How many runs were alive at each time, and how much concurrent runs slow each other down.

Measured step times are converted to those of a run alone. A simulation then lengthens them by the number
of runs alive at each moment, so that a half-empty last wave runs faster than a full one.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Stretch = tuple[float, int]  # seconds, runs alive


@dataclass(frozen=True, slots=True)
class Crowding:
    """Slowdown of a step relative to a run alone, by the number of runs alive.

    Attributes:
        points: (runs alive, slowdown), ascending in both; interpolated linearly.
        is_full: whether the last point uses the whole machine, so that twice the runs double the slowdown.
    """

    points: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    is_full: bool = False

    def of(self, alive: float) -> float:
        """Return the slowdown of a step with `alive` runs alive."""
        if alive <= self.points[0][0]:
            return self.points[0][1]
        for (few, low), (many, high) in itertools.pairwise(self.points):
            if alive <= many:
                return low + (high - low) * (alive - few) / (many - few)
        many, high = self.points[-1]
        return high * alive / many if self.is_full else high

    def over(self, stretches: Sequence[Stretch]) -> float:
        """Return the mean slowdown of work over some stretches of time."""
        whole_s = math.fsum(seconds for seconds, _ in stretches)
        alone_s = math.fsum(seconds / self.of(alive) for seconds, alive in stretches)
        return whole_s / alone_s if alone_s > 0 else 1.0


ALONE = Crowding()


def on_cores(cores: float) -> Crowding:
    """Return the crowding of runs that each keep one core busy."""
    return Crowding(((max(1.0, cores), 1.0),), is_full=True)


class Alive:
    """How many runs of a campaign were alive at each time."""

    def __init__(self, spans: Iterable[tuple[float, float]], most: int = 0) -> None:
        """Count.

        Args:
            spans: each run's start and end, in seconds of one clock.
            most: maximum concurrent runs of the campaign; 0 if not known.
        """
        changes = sorted((at, step) for begin, end in spans for at, step in ((begin, 1), (end, -1)))
        counts = itertools.accumulate(step for _, step in changes)
        self._times = [at for at, _ in changes]
        self._counts = [min(count, most or count) for count in counts]  # from each time onwards

    @property
    def is_known(self) -> bool:
        """Whether any span is known."""
        return bool(self._times)

    def between(self, begin: float, end: float) -> tuple[Stretch, ...]:
        """Return the stretches of a run's life, each with the number of runs alive, itself included."""
        first, last = bisect.bisect_right(self._times, begin), bisect.bisect_left(self._times, end)
        edges = [begin, *self._times[first:last], end]
        counts = [max(1, self._counts[i]) if i >= 0 else 1 for i in range(first - 1, last)]
        stretches = zip(itertools.pairwise(edges), counts, strict=True)
        return tuple((until - since, alive) for (since, until), alive in stretches if until > since)
