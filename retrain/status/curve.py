"""A run's reward over its steps, in so few numbers that a thousand curves cost nothing to keep."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_POINTS = 64  # wider than any sparkline; when there are more, neighbours are joined


@dataclass(slots=True)
class Curve:
    """Means over equal spans of steps."""

    span: int = 1  # steps to a point
    _means: list[float] = field(default_factory=list)
    _spans: list[tuple[int, int]] = field(default_factory=list)  # number of the span, steps in it
    _last_step: int = -1

    def add(self, step: int, value: float) -> None:
        """Add a step; a step that came before takes back all since, as a resumed run does."""
        if step <= self._last_step:
            self._take_back(step // self.span)
        self._last_step = step
        self._put(step // self.span, value, 1)
        while len(self._means) > MOST_POINTS:
            self._widen()

    def values(self) -> tuple[float, ...]:
        """Return the means, the earliest first."""
        return tuple(self._means)

    def _put(self, number: int, mean: float, count: int) -> None:
        if self._spans and self._spans[-1][0] == number:
            _, before = self._spans.pop()
            mean, count = (self._means.pop() * before + mean * count) / (before + count), before + count
        self._means.append(mean)
        self._spans.append((number, count))

    def _take_back(self, number: int) -> None:
        while self._spans and self._spans[-1][0] >= number:
            self._spans.pop()
            self._means.pop()

    def _widen(self) -> None:
        means, spans = self._means, self._spans
        self.span, self._means, self._spans = self.span * 2, [], []
        for mean, (number, count) in zip(means, spans, strict=True):
            self._put(number // 2, mean, count)
