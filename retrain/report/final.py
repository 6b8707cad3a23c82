"""Reduces a run to one final value per metric.

`eval_*` values, measured on held-out prompts, come from the evaluation at the end of the run. Every other
metric is the mean over the run's last steps: one step is too noisy, and the whole history shows how fast
it learned rather than how well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.errors import ConfigError
from retrain.records.text import plain
from retrain.registry import hint
from retrain.report.columns import number
from retrain.report.gather import RunHistory

HELD_OUT = "eval_"
LAST_FRACTION = 0.1  # of the steps: enough to average out noise, few enough that learning has mostly ended
FEWEST_STEPS = 10


@dataclass(frozen=True)
class Moment:
    """When a run is judged."""

    step: int | None = None  # as if it had ended after this step; None: at its end, which it must reach
    last: int = 0  # steps to average over; 0: a tenth of the run's, at least 10

    def has(self, run: RunHistory) -> bool:
        """Whether a run got that far."""
        return run.is_done if self.step is None else run.last_step >= self.step


def final_value(run: RunHistory, metric: str, moment: Moment) -> float | None:
    """Return a run's final value; None if it did not get that far or lacks the metric."""
    if not moment.has(run):
        return None
    is_held_out = metric.startswith(HELD_OUT)
    if is_held_out and moment.step is None and metric in run.result:
        value = number(run.result[metric])
        return None if math.isnan(value) else value
    values, steps = run.columns.metric(metric), run.columns.steps
    end = run.last_step if moment.step is None else moment.step
    last = moment.last or max(FEWEST_STEPS, round(LAST_FRACTION * end))
    counts = np.isfinite(values) & (steps <= end) & (is_held_out | (steps > end - last))
    known = values[counts]
    return (float(known[-1]) if is_held_out else float(np.mean(known))) if len(known) else None


def describe(metric: str, moment: Moment) -> str:
    """Return how a metric's final value is computed."""
    at = "at the end" if moment.step is None else f"at step {moment.step}"
    if metric.startswith(HELD_OUT):
        return f"held-out evaluation {at}"
    return f"mean of the last {moment.last} steps {at}" if moment.last else f"mean of the last tenth {at}"


def known_metrics(runs: Iterable[RunHistory]) -> tuple[str, ...]:
    """List the metrics of all runs, in the order of their rows."""
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.columns.metrics)
        names |= dict.fromkeys(
            key
            for key, value in run.result.items()
            if key.startswith(HELD_OUT) and not math.isnan(number(value))
        )
    return tuple(names)


def check_metrics(names: Sequence[str], known: Sequence[str]) -> None:
    """Check that some run has each metric, unless no run has any.

    Raises:
        ConfigError: an unknown metric; suggests the nearest, or lists all.
    """
    for name in names:
        if known and name not in known:
            others = hint(name, known, f"there are {', '.join(known)}")
            raise ConfigError(f"--metric {plain(name)}: no run has it; {plain(others, 2000)}")
