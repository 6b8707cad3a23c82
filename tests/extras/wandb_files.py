"""Reads what W&B's offline mode wrote: LevelDB's log format, with a protobuf in each record."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER, BLOCK = 7, 2**15
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def offline_runs(directory: Path) -> list[Path]:
    """List the files below a directory, the earliest first."""
    return sorted(directory.rglob("*.wandb"))


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, str]]:
    """Return a file's run (id, group, name, tags), its history rows, and the step axis of each metric."""
    from wandb.proto import wandb_internal_pb2

    run: dict[str, Any] = {}
    history, axes = [], {}
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            told = record.run
            run = {"id": told.run_id, "group": told.run_group, "name": told.display_name}
            run |= {"tags": list(told.tags), "project": told.project, "text": str(told)}
        elif kind == "history":
            keys = ((item.key or ".".join(item.nested_key), item.value_json) for item in record.history.item)
            history.append({key: json.loads(value) for key, value in keys})
        elif kind == "metric":
            axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
    return run, history, axes


def _records(data: bytes) -> Iterator[bytes]:
    at, parts = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        at += HEADER
        parts += data[at : at + length]
        at += length
        if kind in (FULL, LAST):
            yield parts
            parts = b""
        elif kind not in (FIRST, MIDDLE):
            return
