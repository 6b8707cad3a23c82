"""The writers are stopped dead before, half-way through and after each of their file operations."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.records.files import read_json, remove_leftovers, write_json
from retrain.records.metrics import MetricsWriter, read_metrics
from retrain.records.run_state import begin_attempt, end_attempt, read_attempts
from tests.scanned import scan_metrics

OPERATIONS = ("open", "write", "ftruncate", "fsync", "replace", "unlink", "mkdir", "close")
DIED, FINISHED = 9, 0


def _stop_at(operation: int, moment: str) -> None:
    """Make this process die at its n-th file operation, without any clean-up."""
    done = 0

    def wrap(name, real):
        def stopping(*arguments, **options):
            nonlocal done
            done += 1
            if done == operation and moment == "before":
                os._exit(DIED)
            if done == operation and moment == "half" and name == "write":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os._exit(DIED)
            result = real(*arguments, **options)
            if done == operation and moment == "after":
                os._exit(DIED)
            return result

        return stopping

    for name in OPERATIONS:
        setattr(os, name, wrap(name, getattr(os, name)))


def _crash_everywhere(write: Callable[[], None], check: Callable[[], None]) -> int:
    """Run `write` in a child that dies at each point in turn; `check` after each death and at the end."""
    for operation in range(1, 100):
        ends = set()
        for moment in ("before", "half", "after"):
            child = os.fork()
            if child == 0:
                _stop_at(operation, moment)
                write()
                os._exit(FINISHED)
            ends.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            check()
        if ends == {FINISHED}:
            return operation - 1
    raise AssertionError("the writer never finished")


def test_a_replaced_file_is_the_old_or_the_new_one_at_every_crash_point(tmp_path: Path):
    path = tmp_path / "manifest.json"
    write_json(path, {"n": "old"})

    def check() -> None:
        assert read_json(path) in ({"n": "old"}, {"n": "new"})
        remove_leftovers(tmp_path)
        assert list(tmp_path.iterdir()) == [path]
        write_json(path, {"n": "old"})

    assert _crash_everywhere(lambda: write_json(path, {"n": "new"}), check) >= 7


@pytest.mark.parametrize("torn_tail", [b"", b'{"step": 3, "lo', b'{"step": 3, "loss": 0.5, "attempt": 1}'])
def test_no_row_is_lost_doubled_or_unreadable_at_any_crash_point(tmp_path: Path, torn_tail: bytes):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, 1) as metrics:
        metrics.append({"step": 1})
        metrics.append({"step": 2})
    before = path.read_bytes() + torn_tail
    path.write_bytes(before)
    kept = [row["step"] for row in read_metrics(tmp_path)]

    def write() -> None:
        with MetricsWriter(path, 2) as metrics:
            for step in range(len(kept) + 1, len(kept) + 4):
                metrics.append({"step": step})
                metrics.sync()

    def check() -> None:
        steps = [row["step"] for row in read_metrics(tmp_path)]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= len(kept)
        with MetricsWriter(path, 3) as metrics:
            metrics.append({"step": 99})
        assert scan_metrics(tmp_path).skipped_lines == 0
        path.write_bytes(before)

    assert _crash_everywhere(write, check) >= 8


def test_attempts_are_never_doubled_or_unreadable_at_any_crash_point(tmp_path: Path):
    path = tmp_path / "attempts.jsonl"

    def write() -> None:
        end_attempt(path, begin_attempt(path), "done")

    begin_attempt(path)
    before = path.read_bytes()

    def check() -> None:
        begin_attempt(path)
        numbers = [attempt.number for attempt in read_attempts(path)]
        assert numbers in ([1, 2], [1, 2, 3])
        path.write_bytes(before)

    assert _crash_everywhere(write, check) >= 8
