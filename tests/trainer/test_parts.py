"""Whatever a run does beside its algorithm attaches to the loop, which is not edited for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.control.rules import StateDict
from retrain.records.metrics import read_metrics
from retrain.records.row_parts import column, row_part
from retrain.records.run_state import read_attempts, read_done
from retrain.records.step_row import StepRow
from retrain.trainer import checkpoint, opening, worker
from retrain.trainer.part import Due, Loop, Part, TakenStep
from tests.clocks import without_times
from tests.trainer.test_trainer import SMALL, make_run, train, with_


@row_part()
class Longest:
    """What the part below adds to a row."""

    tokens: int = column("tokens", "the longest completion of the run so far", key="longest_so_far")


class LongestCompletion(Part):
    """A capability of a few lines: it follows a run's longest completion, and stops the run after a step."""

    name = "longest"

    def __init__(self, last_step: int, calls: list[str]) -> None:
        self._last_step, self._calls, self._tokens = last_step, calls, 0

    def begin(self, loop: Loop) -> None:
        self._calls.append(f"begin {loop.step}")

    def before_step(self, loop: Loop) -> None:
        self._calls.append(f"before {loop.step}")

    def why_to_stop(self, step: int, due: Sequence[Due] = (), *, is_step: bool = True) -> str:
        return f"{self._tokens} tokens suffice" if step == self._last_step and is_step else ""

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        self._tokens = max(self._tokens, taken.rollouts.length_max)
        return replace(row, others={**row.others, "longest": Longest(tokens=self._tokens)})

    def finish(self, loop: Loop) -> dict[str, int]:
        return {"longest": self._tokens}

    def state_dict(self) -> StateDict:
        return {"tokens": self._tokens}

    def load_state_dict(self, state: StateDict) -> None:
        self._calls.append(f"load {state['tokens']}")
        self._tokens = state["tokens"]

    def close(self) -> None:
        self._calls.append("close")


def attach(monkeypatch: pytest.MonkeyPatch, part: Part) -> None:
    parts_of = opening.parts_of

    def with_another(run: opening.OpenRun) -> Iterator[Part]:
        yield from parts_of(run)
        yield part

    monkeypatch.setattr(opening, "parts_of", with_another)


def test_a_part_of_ones_own_stops_a_run_and_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, calls = make_run(tmp_path / "r", SMALL), []
    with monkeypatch.context() as context:
        attach(context, LongestCompletion(2, calls))
        assert worker.run(files.directory, threading.Event()) == 130
    why = "stopped after step 2: 4 tokens suffice; a checkpoint was saved"
    assert read_attempts(files.attempts)[-1].message == why
    assert calls == ["begin 0", "before 0", "before 1", "before 2", "close"]
    calls.clear()
    attach(monkeypatch, LongestCompletion(0, calls))
    assert worker.run(files.directory, threading.Event()) == 0
    assert calls[:3] == ["load 4", "begin 2", "before 2"]
    assert [row["longest_so_far"] for row in read_metrics(files.directory)] == [4] * 6
    assert (done := read_done(files.done)) is not None
    assert done.result["longest"] == 4


def test_a_part_that_only_looks_changes_no_other_column(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = read_metrics(train(tmp_path / "plain").directory)
    attach(monkeypatch, LongestCompletion(-1, []))
    rows = read_metrics(train(tmp_path / "watched").directory)
    assert [row.popitem()[0] for row in rows] == ["longest_so_far"] * 6
    assert without_times(rows) == without_times(plain)


class HeldOutReached(Part):
    """A capability of a few lines: it ends a run as done once its held-out reward is high enough."""

    name = "reached"

    def __init__(self, reward: float) -> None:
        self._reward, self._is_reached = reward, False

    def is_over(self, step: int) -> bool:
        return self._is_reached

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        reward = row.evaluation.reward if row.evaluation else None
        self._is_reached = reward is not None and reward >= self._reward
        return row

    def state_dict(self) -> StateDict:
        return {"is_reached": self._is_reached}

    def load_state_dict(self, state: StateDict) -> None:
        self._is_reached = state["is_reached"]


ENDING = {
    **with_("training", eval_every=2),
    "data": {"task": "successor", "eval_prompts": 2},
    "eval": [{"name": "last", "prompts": 1}],
}


@pytest.mark.parametrize("speed", [0, 1], ids=["in turn", "meanwhile"])
def test_a_part_of_ones_own_ends_a_run_as_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: int
) -> None:
    attach(monkeypatch, HeldOutReached(0.0))
    raw = {**ENDING, "rate_limiter": {"rate_limit_speed_batch_per_sim": speed}}
    files = train(tmp_path / "r", raw)
    assert [row["step"] for row in read_metrics(files.directory)] == [1, 2]
    assert (done := read_done(files.done)) is not None
    assert (done.result["steps"], "eval_last_reward" in done.result) == (2, True)
    assert checkpoint.steps_of(files.checkpoints)[-1] == 2


def test_a_run_that_a_part_ended_is_over_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(monkeypatch, HeldOutReached(0.0))
    files = train(tmp_path / "r", ENDING)
    files.done.unlink()  # as of one that was killed before it could write this
    assert worker.run(files.directory, threading.Event()) == 0
    assert [row["step"] for row in read_metrics(files.directory)] == [1, 2]
