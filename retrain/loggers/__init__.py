"""Loggers: copies of a run's rows for the tools that people already use. metrics.jsonl stays the truth.

A logger is a file or folder that defines `open_logger(run, *, ...) -> Logger`; its keyword-only
parameters are the keys of `[logging.logger_params.<name>]`. Each is called from one thread of its own, so
that it may be slow, hang or fail without holding up training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from retrain.registry import PluginSpec

SPEC = PluginSpec("logger", "open_logger", ("run",), members=("id", "rows", "flush", "close"))


Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """What a logger may know of a run."""

    campaign: str  # "" for a run of its own
    run_id: str
    condition: str
    seed: int
    attempt: int
    resumed_from_step: int  # rows after it are logged again
    directory: Path  # the run's; a logger's files go below it
    settings: Mapping[str, Any]  # the configuration without what may be secret
    stored_id: str  # what `Logger.id` was in an earlier attempt; "" in the first


class Logger(Protocol):
    """An open connection to a tool."""

    id: str  # how the tool knows this run; kept, and given back to the next attempt
    settles_s: float  # a flushed row is safe from a kill once it is so old; younger ones are logged again

    def rows(self, rows: Sequence[Row]) -> None:
        """Log steps, in order; a step may be one that an earlier attempt logged."""
        ...

    def flush(self) -> None:
        """Make what was logged last."""
        ...

    def close(self, state: str, result: Row) -> None:
        """End: how (a RunState), and what came out."""
        ...


def numbers(row: Row) -> dict[str, float]:
    """Return a row's numbers: what every tool can draw; its step, seed and attempt are no curves."""
    return {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and key not in ("step", "seed", "attempt")
    }
