import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.base.errors import RecordsError
from retrain.records.metrics import (
    MetricsWriter,
    read_ends,
    read_metrics,
    stream_rows,
)
from tests.scanned import scan_metrics


def _write(directory, attempt, steps, **values):
    with MetricsWriter(directory / "metrics.jsonl", attempt) as metrics:
        for step in steps:
            metrics.append({"step": step} | values)


def _told(directory):
    return [(row["step"], row["attempt"]) for row in read_metrics(directory)]


def test_rows_come_back_with_their_attempt(tmp_path):
    _write(tmp_path, 1, [1], loss=0.25)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.25, "attempt": 1}]


def test_a_resumed_attempt_supersedes_every_step_from_its_first_on(tmp_path):
    _write(tmp_path, 1, [1, 2, 3, 4, 5])
    _write(tmp_path, 2, [3])
    assert _told(tmp_path) == [(1, 1), (2, 1), (3, 2)]


def test_an_attempt_that_starts_over_leaves_nothing_of_the_first(tmp_path):
    _write(tmp_path, 1, [1, 2, 3])
    _write(tmp_path, 2, [1, 2])
    assert _told(tmp_path) == [(1, 2), (2, 2)]


@settings(max_examples=40)
@given(firsts=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 10)), min_size=1, max_size=6))
def test_whatever_is_resumed_each_step_is_told_once_and_by_the_latest(tmp_path_factory, firsts):
    directory = tmp_path_factory.mktemp("run")
    latest: dict[int, int] = {}
    for attempt, (first, count) in enumerate(firsts, start=1):
        _write(directory, attempt, range(first, first + count))
        latest = {step: told for step, told in latest.items() if step < first}
        latest |= dict.fromkeys(range(first, first + count), attempt)
    assert _told(directory) == sorted(latest.items())


def test_a_file_cut_at_any_byte_keeps_its_whole_rows_and_takes_new_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    _write(tmp_path, 1, [1, 2, 3], note='quote " brace } newline \n')
    whole = path.read_bytes()
    ends = [at for at in range(len(whole)) if whole[at : at + 1] == b"\n"]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = [step for step, end in zip([1, 2, 3], ends, strict=True) if cut >= end]
        assert [row["step"] for row in read_metrics(tmp_path)] == complete
        _write(tmp_path, 2, [9])
        assert [row["step"] for row in read_metrics(tmp_path)] == [*complete, 9]
        assert scan_metrics(tmp_path).skipped_lines == 0


def test_lines_that_are_no_rows_are_skipped_and_counted(tmp_path):
    _write(tmp_path, 1, [1])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'\0\0\0\n{"torn": \n[1]\n{"step": "2"}\n{"step": true}\n\xff\xfe\n\n')
        file.write(b'{"step": 1' + b"0" * 400 + b"}\n")
    _write(tmp_path, 1, [2])
    scan = scan_metrics(tmp_path)
    assert [row["step"] for row in scan.rows] == [1, 2]
    assert scan.skipped_lines == 7


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), [1.0, float("-inf")]])
def test_what_is_not_finite_is_refused_by_name_and_not_written(tmp_path, value):
    with pytest.raises(ValueError, match="grad_norm is"):
        _write(tmp_path, 1, [1], loss=0.5, grad_norm=value)
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("step", [None, -1, 1.5, True, "1"])
def test_a_row_without_a_step_number_is_refused(tmp_path, step):
    with pytest.raises(ValueError, match="step is"):
        _write(tmp_path, 1, [step])


def test_numpy_scalars_are_written_as_plain_numbers(tmp_path):
    _write(tmp_path, 1, [1], loss=np.float32(0.5), tokens=np.int64(7))
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5, "tokens": 7, "attempt": 1}]


def test_the_tail_is_the_last_rows_whatever_their_length(tmp_path):
    for step in range(1, 30):
        _write(tmp_path, 1, [step], filler="x" * (step * 997))
    for n in (1, 2, 5, 29, 100):
        assert read_ends(tmp_path / "metrics.jsonl", n).last == read_metrics(tmp_path)[-n:]


def test_a_tail_across_a_resume_tells_each_step_once(tmp_path):
    _write(tmp_path, 1, [1, 2, 3, 4])
    _write(tmp_path, 2, [3])
    assert [(r["step"], r["attempt"]) for r in read_ends(tmp_path / "metrics.jsonl", 4).last] == [
        (2, 1),
        (3, 2),
    ]


@pytest.mark.parametrize("nested", [{}, {"sizes": {"step": 99, "loss": 99}}])
def test_the_step_of_a_row_is_its_own(tmp_path, nested):
    _write(tmp_path, 1, [1], note='a "step": 7, {} \\', **nested, loss=-1.5e-3, tag="a,b")
    (row,) = stream_rows(tmp_path / "metrics.jsonl")
    assert row == {
        "step": 1,
        "attempt": 1,
        "note": 'a "step": 7, {} \\',
        **nested,
        "loss": -1.5e-3,
        "tag": "a,b",
    }


def test_a_run_without_rows_reads_as_empty_and_a_missing_run_is_an_error(tmp_path):
    assert read_metrics(tmp_path) == []
    assert read_ends(tmp_path / "metrics.jsonl", 5).last == []
    with pytest.raises(RecordsError, match="is not a run's directory"):
        read_metrics(tmp_path / "nothing")


def test_a_planted_symlink_is_not_written_through(tmp_path):
    (tmp_path / "precious").touch()
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(RecordsError, match="symbolic link"):
        _write(tmp_path, 1, [1])


FILL_UP = """
import sys, pathlib
from retrain.base.errors import RecordsError
from retrain.records.metrics import MetricsWriter
writer = MetricsWriter(pathlib.Path(sys.argv[1]), attempt=1)
for step in range(1000):
    try:
        writer.append({"step": step, "filler": "x" * 100})
    except RecordsError as error:
        print(step, error)
        break
"""


def test_a_full_disk_cuts_the_half_written_row_and_keeps_all_before(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-B", "-c", FILL_UP, str(tmp_path / "metrics.jsonl")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)),
        capture_output=True,
        text=True,
        check=True,
    )
    refused_step, message = ended.stdout.split(" ", 1)
    assert "cannot append to (File too large)" in message
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(int(refused_step)))
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")


KEEP_WRITING = """
import sys, pathlib
from retrain.records.metrics import MetricsWriter
writer = MetricsWriter(pathlib.Path(sys.argv[1]), attempt=int(sys.argv[2]))
for step in range(int(sys.argv[3]), 10**9):
    writer.append({"step": step, "filler": "x" * 10_000})
    print(step, flush=True)
"""


def test_no_acknowledged_row_is_lost_by_kill_9(tmp_path):
    acknowledged = -1
    for attempt in range(1, 5):
        command = [sys.executable, "-c", KEEP_WRITING, tmp_path / "metrics.jsonl", attempt, acknowledged + 1]
        with subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, text=True) as writer:
            for _ in range(20):
                acknowledged = int(writer.stdout.readline())
            os.kill(writer.pid, signal.SIGKILL)
            acknowledged = max([acknowledged, *map(int, writer.stdout.read().split("\n")[:-1])])
        steps = [row["step"] for row in read_metrics(tmp_path)]
        assert steps == list(range(len(steps)))
        assert len(steps) > acknowledged


def test_rows_that_are_streamed_are_those_that_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, attempt=1) as writer:
        for step in (1, 2, 3, 4, 3, 4, 5):
            writer.append({"step": step, "nested": {"step": 9}})
    path.write_bytes(b"\n" + path.read_bytes() + b'{"step": 6, "torn')
    assert list(stream_rows(path)) == read_metrics(tmp_path)
