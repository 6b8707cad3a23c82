"""Columns of a few metrics, found in lines without parsing them, are what parsed rows give."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.results.report.gather import GrowingColumns, read_columns

NAMES = ("mean_reward", "step_time_s", "loss")
values = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(10**30), 10**30),
    st.booleans(),
    st.none(),
    st.sampled_from(['"mean_reward": 5', ', "loss": 5, "', "mean_reward", "\\", "é\n"]),
    st.lists(st.sampled_from(["loss", 'x", "loss": 2, "'])),
    st.just({"loss": 3}),
)
rows = st.dictionaries(st.sampled_from([*NAMES, "other", 'odd", "loss']), values)


@given(st.lists(st.tuples(st.integers(0, 9), rows)))
def test_numbers_found_in_lines_are_those_of_the_rows(tmp_path_factory, steps) -> None:
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, **row}) + "\n" for step, row in steps))
    every, few = read_columns(path), read_columns(path, NAMES)
    assert few.steps.tolist() == every.steps.tolist()
    for name in NAMES:
        np.testing.assert_array_equal(few.metric(name), every.metric(name))


@given(st.lists(st.tuples(st.integers(0, 9), rows)), st.lists(st.integers(1, 200)), st.booleans())
def test_a_file_that_grows_gives_what_it_gives_as_a_whole(tmp_path_factory, steps, cuts, has_more) -> None:
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    growing, at = GrowingColumns(path, NAMES, has_more=has_more), 0
    assert len(growing.refresh().steps) == 0
    data = "".join(json.dumps({"step": step, **row}) + "\n" for step, row in steps).encode()
    for size in [*cuts, len(data)]:  # also in the middle of lines
        with path.open("ab") as file:
            file.write(data[at : at + size])
        at += size
        found = growing.refresh()
        assert growing.refresh() is found
    whole = read_columns(path, NAMES)
    assert found.steps.tolist() == whole.steps.tolist()
    for name in NAMES:
        np.testing.assert_array_equal(found.metric(name), whole.metric(name))


def test_a_file_that_is_replaced_is_read_anew(tmp_path: Path) -> None:
    path, other = tmp_path / "metrics.jsonl", tmp_path / "other"
    growing = GrowingColumns(path, ("loss",))
    path.write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 3}\n')
    assert growing.refresh().metric("loss").tolist() == [2.0, 3.0]
    other.write_text('{"step": 1, "loss": 7}\n')
    other.replace(path)
    assert growing.refresh().metric("loss").tolist() == [7.0]


@pytest.mark.parametrize("line", ["{", '{"step": 1', "[]", '{"step": true}', "\0\0"])
def test_lines_that_are_no_rows_are_counted(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "loss": 2}}\n{line}\n{{"step": 2, "loss": 3}}\n')
    found = read_columns(path, ("loss",))
    assert (found.metric("loss").tolist(), found.skipped_lines) == ([2.0, 3.0], 1)
