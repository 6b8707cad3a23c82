"""Reads metrics.jsonl as the product does, and counts the lines that it skips: none may be torn."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from retrain.records.layout import RunFiles
from retrain.records.lines import Row, is_count, parse_line, read_lines
from retrain.records.metrics import read_metrics


@dataclass(frozen=True)
class MetricsScan:
    """A run's rows in step order, each step once, and how many lines were unreadable."""

    rows: list[Row]
    skipped_lines: int


def scan_metrics(run_dir: str | os.PathLike[str]) -> MetricsScan:
    lines = map(parse_line, read_lines(RunFiles(Path(run_dir)).metrics))
    skipped = sum(row is None or not is_count(row.get("step")) for row in lines)
    return MetricsScan(read_metrics(run_dir), skipped)
