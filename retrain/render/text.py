"""Numbers and times as people read them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from retrain.plan.estimate.durations import format_duration

if TYPE_CHECKING:
    from retrain.records.run_row import RunRow

MISSING = "-"


def number(value: float | None, digits: int = 3) -> str:
    """Show a number, or a dash."""
    if value is None or not math.isfinite(value):
        return MISSING if value is None or math.isnan(value) else "none"
    return f"{value:.{digits}f}"


def spread(mean: float | None, std: float | None) -> str:
    """Show mean ± spread; without a spread, the mean alone."""
    return number(mean) if std is None else f"{number(mean)} ± {number(std)}"


def run_name(run: RunRow) -> str:
    """Name a run by its condition's own name, as commands take it beside its id."""
    return run.run_id if run.seed is None else f"{run.condition}_s{run.seed}"


def duration(seconds: float | None) -> str:
    """Show a time span in its two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    return format_duration(seconds)
