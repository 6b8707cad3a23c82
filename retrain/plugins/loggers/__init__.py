"""Loggers copy a run's rows to experiment trackers. metrics.jsonl stays the source of truth.

A plugin is one file or folder with `open_logger(run, *, <params>) -> Logger`; its keyword-only parameters are
the keys of `[logging.logger_params.<name>]`. Each logger is called from its own thread, so it may be slow,
hang or fail without delaying training.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.base.clock import posix_s
from retrain.base.redaction import HIDDEN, redacted
from retrain.base.registry import PluginSpec

Row = Mapping[str, Any]
_SECRET_KEY = re.compile(
    r"(?i)(^|_|-)(keys?|apikeys?|token|secrets?|passwords?|passwd|credentials?|auth|authorization)$"
)


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """What a logger is told about a run."""

    campaign: str  # "" for a single run
    run_id: str
    condition: str
    seed: int
    attempt: int
    resumed_from_step: int  # rows after it are repeated
    directory: Path  # of the run; a logger's files go below it
    settings: Mapping[str, Any]  # the configuration without secrets
    stored_id: str  # `Logger.id` of an earlier attempt; "" in the first
    campaign_directory: Path = Path()  # of the run itself if it is a single one


class Logger(ABC):
    """An open connection to a tracker.

    A class of your own needs not derive from it: then it has `flush`, and may leave out `durable_after_s`.
    """

    id: str  # of the run in the tracker; stored and passed to the next attempt
    durable_after_s: float = 0.0  # age at which a flushed row survives a kill; younger ones are logged again

    @abstractmethod
    def rows(self, rows: Sequence[Row]) -> None:
        """Log rows in step order; an earlier attempt may have logged some of them."""

    def flush(self) -> None:  # noqa: B027 - some write at once
        """Make logged rows durable."""

    @abstractmethod
    def close(self, state: str, result: Row) -> None:
        """End the run with its state (a `RunState`) and its result."""


SPEC = PluginSpec("logger", "open_logger", ("run",), members=("id", "rows", "flush", "close"), returns=Logger)


def numbers(row: Row) -> dict[str, float]:
    """Return a row's numeric fields, without step, seed and attempt, which are no curves."""
    return {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and key not in ("step", "seed", "attempt")
    }


def written_at_s(row: Row) -> float:
    """Return a row's timestamp in seconds since 1970; the current time if it has none."""
    written_s = posix_s(row.get("timestamp"))
    return time.time() if written_s is None else written_s


def without_secrets(value: Any, key: str = "") -> Any:
    """Return a copy of a configuration without secrets, recognised by key or within a text."""
    if isinstance(value, Mapping):
        return {str(k): without_secrets(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(each, key) for each in value]
    if not isinstance(value, str):
        return value
    return HIDDEN if value and _SECRET_KEY.search(key) else redacted(value)
