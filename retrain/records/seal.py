"""Detects changes to a run's metrics.jsonl after the run finished.

done.json holds the file's row count and digest. Runs of 0.1.0 have neither and are not checked.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.errors import DamagedRecordError, records_error
from retrain.records.files import open_regular
from retrain.records.metrics import count_steps


@dataclass(frozen=True, slots=True)
class Seal:
    """Row count, size and digest of a finished run's metrics.jsonl."""

    rows: int  # steps, each counted once
    size: int  # bytes
    sha256: str


def seal_of(path: Path) -> Seal:
    """Return the seal of a metrics.jsonl; a missing file counts as empty.

    Raises:
        RecordsError: it cannot be read.
    """
    size, digest = _digest(path)
    return Seal(count_steps(path), size, digest)


def parse_seal(found: Mapping[str, Any]) -> Seal:
    """Read a seal back from done.json.

    Raises:
        KeyError, TypeError, ValueError: it is not a seal.
    """
    rows, size, digest = found["rows"], found["bytes"], found["sha256"]
    if not (type(rows) is int and type(size) is int and isinstance(digest, str)):
        raise ValueError("a seal of another kind")
    return Seal(rows, size, digest)


def require_sealed(path: Path, seal: Seal) -> None:
    """Check that a finished run's metrics.jsonl is unchanged.

    Raises:
        DamagedRecordError: it changed.
        RecordsError: it cannot be read.
    """
    size, digest = _digest(path)
    if (size, digest) == (seal.size, seal.sha256):
        return
    rows = count_steps(path)
    lost = f"{rows} of {seal.rows} rows are left" if rows != seal.rows else "rows differ"
    raise DamagedRecordError(
        f"{path}: changed after the run finished ({lost}), so the run is left out of all results; "
        "restore the file, or repeat the run with `retrain resume --failed`"
    )


def _digest(path: Path) -> tuple[int, str]:
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return 0, hashlib.sha256().hexdigest()
    try:
        with os.fdopen(fd, "rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return file.tell(), digest
    except OSError as error:
        raise records_error(path, "read", error) from error
