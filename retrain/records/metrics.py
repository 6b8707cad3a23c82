"""metrics.jsonl: one row per step, one writer at a time, each step read once; and averages of rows.

A resumed run continues from its checkpoint and repeats the steps after it, so the file may hold a
step more than once. The last row counts: a row replaces every earlier row of the same or a later step.

done.json holds a seal of the file, its row count and digest, which shows whether it changed after the run
finished.

Averages are not the standard library's, because importing `statistics` takes 10 ms, too long for `status`.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from retrain.base.errors import DamagedRecordError, RecordsError
from retrain.base.redaction import recorded_error
from retrain.records.files import opened
from retrain.records.layout import RunFiles, campaign_of
from retrain.records.lines import (
    LineAppender,
    Row,
    dump_line,
    is_count,
    number_in,
    parse_line,
    read_lines,
    read_tail,
)
from retrain.records.text import as_typed
from retrain.records.windows import late_rows, steps_averaged

_STEP = re.compile(rb'\{"step": (\d{1,15})[,}]')  # the start of a row
_HEAD_BYTES = 2**15  # more than one row; a longer first row is ignored
_BLOCK_BYTES = 2**18  # hashed at a time
_LINE_BYTES = 2**13  # more than the rest of one row and a whole one; longer ones have no middle


GIVEN_NAMES = frozenset({"run", "condition", "timestamp"})  # all other texts may quote an error


class MetricsWriter(LineAppender):
    """Append the rows of one attempt; only for the holder of the run's lock."""

    def __init__(self, path: Path, attempt: int) -> None:
        super().__init__(path)
        self._attempt = attempt

    def append(self, row: Mapping[str, object]) -> None:
        """Add one step's row, with this attempt's number.

        Raises:
            ValueError: a value is NaN or infinite (names the key), or `step` is not an integer >= 0.
            TypeError: JSON cannot represent a value (names the key).
        """
        if not is_count(row.get("step")):
            raise ValueError(f"step is {row.get('step')!r}; it must be an integer of 0 or more")
        texts = {
            key: recorded_error(value)
            for key, value in row.items()
            if isinstance(value, str) and key not in GIVEN_NAMES
        }
        self.write(dump_line({**row, **texts, "attempt": self._attempt}))


Late: TypeAlias = tuple[int, float | None]  # a row's step and mean reward


@dataclass(frozen=True)
class MetricsEnds:
    """The first row of a file, or None, its last rows in step order, and one near its middle, or None."""

    first: Row | None
    last: list[Row]
    middle: Row | None = None
    rewards: tuple[float, ...] = ()  # mean reward over all steps, where they are followed
    late: Sequence[Late] = ()  # the rows that a run's value is a mean of, where they are asked for


@dataclass(frozen=True, slots=True)
class Seal:
    """Row count, size and digest of a finished run's metrics.jsonl."""

    rows: int  # steps, each counted once
    bytes: int
    sha256: str


def read_metrics(run_dir: str | os.PathLike[str]) -> list[Row]:
    """Read a run's rows in step order, each step once, also after crashes.

    After a resume, steps that the new attempt has not repeated yet are left out: they were rolled back.

    Raises:
        RecordsError: the directory does not exist, or the file cannot be read.
    """
    files = RunFiles(Path(run_dir))
    if not files.directory.is_dir():
        raise RecordsError(f"{files.directory}: is not a run's directory; `retrain status` lists the runs")
    rows = map(_parse, read_lines(files.metrics))
    return latest_telling(row for row in rows if row is not None)


def require_steps(path: Path, steps: int) -> None:
    """Check that the file has a row for each of the first `steps` steps; raise RecordsError if it has not."""
    missing = sorted(set(range(1, steps + 1)) - set(_kept_lines(read_lines(path))[0]))
    if missing:
        raise RecordsError(
            f"{path}: lacks {len(missing)} of the {steps} steps completed before the newest checkpoint, "
            f"the first being step {missing[0]}; restore the file, or move checkpoints/ away to start over"
        )


def stream_rows(path: Path) -> Iterator[Row]:
    """Iterate over a file's rows in step order, each step once, with one row in memory."""
    numbers = iter(_kept_lines(read_lines(path))[1])  # step order is also file order
    next_kept = next(numbers, None)
    for number, line in enumerate(read_lines(path)):
        if number == next_kept:
            next_kept = next(numbers, None)
            if (row := parse_line(line)) is not None:
                yield row


def _kept_lines(lines: Iterable[bytes]) -> tuple[array[int], array[int]]:
    """Return the steps whose rows count, ascending, and the line numbers of those rows."""
    steps, numbers = array("q"), array("q")
    for number, line in enumerate(lines):
        step = flat_step(line)
        if step is None and (row := _parse(line)) is not None:
            step = int(row["step"])
        if step is not None:
            since = bisect_left(steps, step)
            del steps[since:], numbers[since:]
            steps.append(step)
            numbers.append(number)
    return steps, numbers


def flat_step(line: bytes) -> int | None:
    """Return the step of a row that holds no tables and begins as ours do, without parsing it; else None."""
    start = _STEP.match(line)
    return int(start[1]) if start and line.rfind(b"{") == 0 and line.rstrip().endswith(b"}") else None


def read_ends(path: Path, n: int, *, with_late: bool = False) -> MetricsEnds:
    """Return the first row, one near the middle and at most the last `n`, reading little more than them.

    With `with_late`, also those that a run's value is a mean of.

    There are fewer than `n` if a resume has just repeated steps or lines are incomplete; none without a file.
    """
    try:
        with opened(path) as fd:
            begin = os.pread(fd, _HEAD_BYTES, 0)
            head = [line for line in begin.split(b"\n") if line.strip()]
            tail = head[-n:] if len(begin) < _HEAD_BYTES else read_tail(fd, n)
            middle = _middle_line(fd)
            last = latest_telling(row for row in map(_parse, tail) if row is not None)
            late = _read_late(fd, last) if with_late and last else ()
    except FileNotFoundError:
        return MetricsEnds(None, [])
    first = next((row for row in map(_parse, head) if row is not None), None)
    return MetricsEnds(first, last, _parse(middle), late=late)


def _read_late(fd: int, rows: Sequence[Row]) -> list[Late]:
    """Return the rows that a run's value is a mean of, given its last ones; a resume may repeat some."""
    end, lines = rows[-1]["step"], len(rows)
    while rows[0]["step"] > max(1, end - steps_averaged(end) + 1):
        wanted = max(steps_averaged(end), 2 * lines)
        tail = read_tail(fd, wanted)
        if len(tail) <= lines:
            break
        lines, rows = len(tail), latest_telling(row for row in map(_parse, tail) if row is not None)
    return [(row["step"], number_in(row, "mean_reward")) for row in late_rows(rows, end)]


def read_middle(path: Path) -> Row | None:
    """Return a row near the middle of a file, as `read_ends` does."""
    try:
        with opened(path) as fd:
            return _parse(_middle_line(fd))
    except FileNotFoundError:
        return None


def _middle_line(fd: int) -> bytes:
    part = os.pread(fd, _LINE_BYTES, os.fstat(fd).st_size // 2)
    return part.partition(b"\n")[2].partition(b"\n")[0]


def _parse(line: bytes) -> Row | None:
    row = parse_line(line)
    return row if row is not None and is_count(row.get("step")) else None


def latest_telling(rows: Iterable[Row]) -> list[Row]:
    """Return the row of each step that counts, in step order: a row replaces all rows from its step on."""
    kept: list[Row] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def seal_of(path: Path) -> Seal:
    """Return the seal of a metrics.jsonl; a missing file counts as empty."""
    return Seal(len(_kept_lines(read_lines(path))[0]), *_digest(path))


def require_sealed(path: Path, seal: Seal) -> None:
    """Check that a finished run's metrics.jsonl is unchanged; raise DamagedRecordError if it is not."""
    if _digest(path) == (seal.bytes, seal.sha256):
        return
    rows = len(_kept_lines(read_lines(path))[0])
    lost = f"{rows} of {seal.rows} rows are left" if rows != seal.rows else "rows differ"
    campaign = campaign_of(path.parent).directory
    raise DamagedRecordError(
        f"{path}: changed after the run finished ({lost}), so the run is left out of all results; "
        f"restore the file, or repeat the run with `retrain resume {as_typed(campaign)} --failed`"
    )


def _digest(path: Path) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    try:
        with opened(path) as fd:
            while block := os.read(fd, _BLOCK_BYTES):  # most files are one; `file_digest` clears its buffer
                size += len(block)
                digest.update(block)
    except FileNotFoundError:
        pass
    return size, digest.hexdigest()


def mean(values: Iterable[float | None]) -> float | None:
    """Return the arithmetic mean of the values that are not None."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    try:
        return math.fsum(numbers) / len(numbers)
    except OverflowError:  # huge numbers in a damaged file must not cause a failure
        return sum(value / len(numbers) for value in numbers)


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None."""
    ordered = sorted(value for value in values if value is not None)
    return mean(ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1])


def sample_std(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (divided by n - 1); None for fewer than two values."""
    centre = mean(values)
    if centre is None or len(values) < 2:
        return None
    return math.hypot(*(value - centre for value in values)) / math.sqrt(len(values) - 1)
