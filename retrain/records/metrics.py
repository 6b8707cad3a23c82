"""metrics.jsonl: one row per step, one writer at a time, each step read once.

A resumed run continues from its checkpoint and repeats the steps after it, so the file may hold a
step more than once. The last row counts: a row replaces every earlier row of the same or a later step.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

from retrain.errors import RecordsError, records_error
from retrain.records.files import open_regular
from retrain.records.layout import RunFiles
from retrain.records.lines import LineAppender, Row, dump_line, parse_line, pick, read_lines, read_tail

_MOST_STEPS = 2**53  # the largest exact float integer; a larger number is damage
_HEAD_BYTES = 2**15  # more than one row; a longer first row is ignored


class MetricsWriter:
    """Append the rows of one attempt; only for the holder of the run's lock."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._lines = LineAppender(path)
        self._attempt = attempt

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one step's row, with this attempt's number.

        Raises:
            ValueError: a value is NaN or infinite (names the key), or `step` is not an integer >= 0.
            TypeError: JSON cannot represent a value (names the key).
            RecordsError: the write failed; earlier rows are intact and this one is not stored.
        """
        if not is_step(row.get("step")):
            raise ValueError(f"step is {row.get('step')!r}; it must be an integer of 0 or more")
        self._lines.append(dump_line({**row, "attempt": self._attempt}))

    def sync(self) -> None:
        """Make every row so far survive a power loss; call it before saving a checkpoint."""
        self._lines.sync()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._lines.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class MetricsScan:
    """A run's rows in step order, each step once, and how many lines were unreadable."""

    rows: list[Row]
    skipped_lines: int


@dataclass(frozen=True)
class MetricsEnds:
    """The first row of a file, or None, and its last rows in step order."""

    first: Row | None
    last: list[Row]


def read_metrics(run_dir: str | os.PathLike[str]) -> list[Row]:
    """Read a run's rows in step order, each step once, also after crashes.

    After a resume, steps that the new attempt has not repeated yet are left out: they were rolled back.

    Raises:
        RecordsError: the directory does not exist, or the file cannot be read.
    """
    return scan_metrics(run_dir).rows


def scan_metrics(run_dir: str | os.PathLike[str]) -> MetricsScan:
    """Read the rows as `read_metrics` does, and count the lines that are not complete rows."""
    files = RunFiles(Path(run_dir))
    if not files.directory.is_dir():
        raise RecordsError(f"{files.directory}: is not a run's directory; `retrain status` lists the runs")
    return scan_rows(files.metrics)


def require_steps(path: Path, steps: int) -> None:
    """Check that the file has a row for each of the first `steps` steps.

    Raises:
        RecordsError: rows are missing, or the file cannot be read.
    """
    missing = sorted(set(range(1, steps + 1)) - set(_steps(path)))
    if missing:
        raise RecordsError(
            f"{path}: lacks {len(missing)} of the {steps} steps completed before the newest checkpoint, "
            f"the first being step {missing[0]}; restore the file, or move checkpoints/ away to start over"
        )


def count_steps(path: Path) -> int:
    """Count the distinct steps in a file.

    Raises:
        RecordsError: it cannot be read.
    """
    return len(_steps(path))


def stream_rows(path: Path) -> Iterator[Row]:
    """Iterate over a file's rows in step order, each step once, with one row at a time in memory.

    Raises:
        RecordsError: it cannot be read.
    """
    kept = iter(_kept_lines(path)[1])  # step order is also file order
    wanted = next(kept, None)
    for number, line in enumerate(read_lines(path)):
        if number == wanted:
            wanted = next(kept, None)
            row = parse_line(line)
            if row is not None:
                yield row


def _steps(path: Path) -> array[int]:
    return _kept_lines(path)[0]


def _kept_lines(path: Path) -> tuple[array[int], array[int]]:
    """Return the steps whose rows count, ascending, and the line numbers of those rows."""
    steps, lines = array("q"), array("q")
    for number, line in enumerate(read_lines(path)):
        row = pick(line, ("step",))
        step = row.get("step") if row is not None else None
        if is_step(step):
            since = bisect_left(steps, step)
            del steps[since:], lines[since:]
            steps.append(step)
            lines.append(number)
    return steps, lines


def scan_rows(path: Path) -> MetricsScan:
    """Read a file of rows, such as warmup.jsonl, in step order, each step once; none if it is missing.

    Raises:
        RecordsError: it cannot be read.
    """
    lines = [parse_line(line) for line in read_lines(path)]
    rows = [row for row in lines if row is not None and is_step(row.get("step"))]
    return MetricsScan(latest_telling(rows), skipped_lines=len(lines) - len(rows))


def tail_rows(path: Path, n: int) -> list[Row]:
    """Return at most the last `n` rows of a metrics.jsonl, reading only the end of the file.

    There are fewer than `n` if a resume has just repeated steps or lines are incomplete; none without a file.

    Raises:
        RecordsError: it cannot be read.
    """
    return _read_ends(path, n, parse_line).last


def read_ends(path: Path, n: int, keys: Sequence[str]) -> MetricsEnds:
    """Return `step` and scalar `keys` of the first row and the last `n` (as `tail_rows`); rows may hold more.

    Raises:
        RecordsError: it cannot be read.
    """
    return _read_ends(path, n, lambda line: pick(line, ("step", *keys)))


def _read_ends(path: Path, n: int, parse: Callable[[bytes], Row | None]) -> MetricsEnds:
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return MetricsEnds(None, [])
    try:
        begin = os.pread(fd, _HEAD_BYTES, 0)
        head = map(parse, begin.split(b"\n"))
        first = next((row for row in head if row is not None and is_step(row.get("step"))), None)
        is_all = len(begin) < _HEAD_BYTES
        tail = [line for line in begin.split(b"\n") if line.strip()][-n:] if is_all else read_tail(fd, n)
        rows = [parse(line) for line in tail]
    except OSError as error:
        raise records_error(path, "read", error) from error
    finally:
        os.close(fd)
    kept = [row for row in rows if row is not None and is_step(row.get("step"))]
    return MetricsEnds(first, latest_telling(kept))


def latest_telling(rows: Iterable[Row]) -> list[Row]:
    """Return the row of each step that counts, in step order: a row replaces all rows from its step on."""
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def is_step(step: object) -> TypeGuard[int]:
    """Whether a value is a valid step number."""
    return isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= _MOST_STEPS
