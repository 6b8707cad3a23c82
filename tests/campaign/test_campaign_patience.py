"""How long a worker may take, and how long go without a step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from retrain.base.locks import hold
from retrain.campaign.endings import CHECKS, Patience
from retrain.config.schema import CampaignSection
from retrain.records.layout import RunFiles
from retrain.records.run_state import Progress, RunState, begin_attempt, write_progress


def patience(tmp_path: Path, **keys: float) -> tuple[Patience, RunFiles]:
    files = RunFiles(tmp_path)
    return Patience(CampaignSection(**keys), files, now_s=0.0), files  # type: ignore[arg-type]


@contextmanager
def working(files: RunFiles) -> Iterator[None]:
    """Work on a run while entered."""
    with hold(files.lock) or pytest.fail("somebody holds it"):
        begin_attempt(files.attempts)
        yield


def test_a_step_now_and_then_is_no_stall(tmp_path: Path) -> None:
    watched, files = patience(tmp_path, stall_timeout=80.0)
    for step in range(1, 100):
        files.metrics.write_text("row\n" * (step // 5 + 1))  # every fifth look sees another one
        assert watched.ended_by(step * 80.0 / CHECKS) is None


def test_a_warm_up_that_goes_on_is_no_stall(tmp_path: Path) -> None:
    watched, files = patience(tmp_path, stall_timeout=80.0)
    for update in range(1, 100):
        files.warmup.write_text("row\n" * (update // 5 + 1))
        assert watched.ended_by(update * 80.0 / CHECKS) is None


def test_no_step_for_the_timeout_is_a_stall_noticed_soon(tmp_path: Path) -> None:
    watched, files = patience(tmp_path, stall_timeout=80.0)
    files.metrics.write_text("row\n")
    seen = []
    while not (seen and seen[-1][1]):
        seen.append((float(len(seen)), watched.ended_by(len(seen))))
    assert seen[-1][1] is RunState.STALLED
    assert 80.0 <= seen[-1][0] <= 80.0 * (1 + 2 / CHECKS)


def test_time_in_which_the_orchestrator_was_suspended_too_is_no_stall(tmp_path: Path) -> None:
    watched, files = patience(tmp_path, stall_timeout=80.0)
    files.metrics.write_text("row\n")
    looks = [0.0, 10.0, *(3600.0 + second for second in range(100))]
    stalled_at = [now_s for now_s in looks if watched.ended_by(now_s)]
    assert 3600.0 + 80.0 * (1 - 2 / CHECKS) <= stalled_at[0] <= 3600.0 + 80.0


@pytest.mark.parametrize("phase", ["paused: processors are busy", "API paused"])
def test_a_worker_that_yields_to_other_work_is_not_stalled(tmp_path: Path, phase: str) -> None:
    watched, files = patience(tmp_path, stall_timeout=1.0)
    with working(files):
        write_progress(files.status, Progress("running", phase, 3, 10, 1))
        assert all(watched.ended_by(float(now_s)) is None for now_s in range(20))


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_pause_in_which_an_earlier_worker_was_killed_excuses_no_other(
    tmp_path: Path, has_begun: bool
) -> None:
    _, files = patience(tmp_path)
    with working(files):
        write_progress(files.status, Progress("running", "API paused", 3, 10, 1, paused_s=1e6))
    stalled, _ = patience(tmp_path, stall_timeout=1.0)
    late, _ = patience(tmp_path, run_timeout=5.0)
    with working(files) if has_begun else nullcontext():  # it hangs before it has said anything
        assert RunState.STALLED in [stalled.ended_by(float(now_s)) for now_s in range(4)]
        assert late.ended_by(6.0) is RunState.TIMEOUT


def test_a_timeout_counts_from_the_start_whatever_is_done(tmp_path: Path) -> None:
    watched, _ = patience(tmp_path, run_timeout=5.0)
    assert watched.ended_by(4.9) is None
    assert watched.ended_by(5.0) is RunState.TIMEOUT


def test_a_timeout_does_not_count_pauses_of_the_api(tmp_path: Path) -> None:
    watched, files = patience(tmp_path, run_timeout=5.0)
    with working(files):
        for now_s in range(2, 60):  # paused since second 2
            write_progress(files.status, Progress("running", "API paused", 3, 10, 1, paused_s=now_s - 2.0))
            assert watched.ended_by(now_s + 1.0) is None
        assert watched.ended_by(61.9) is None
        assert watched.ended_by(62.0) is RunState.TIMEOUT


def test_without_timeouts_a_worker_may_take_for_ever(tmp_path: Path) -> None:
    watched, _ = patience(tmp_path)
    assert watched.ended_by(1e9) is None


def minutes_without_a_step(watched: Patience, since_s: float) -> float:
    """Look every 10 s until it is a stall; return after how many minutes."""
    now_s = since_s
    while watched.ended_by(now_s) is None:
        now_s += 10.0
    return (now_s - since_s) / 60.0


def row_of(step: int, step_time_s: float) -> str:
    return json.dumps({"step": step, "attempt": 1, "step_time_s": step_time_s}) + "\n"


@pytest.mark.parametrize(("step_s", "least"), [(0.01, 30.0), (60.0, 30.0), (300.0, 100.0)])
def test_a_stall_that_adapts_is_twenty_times_the_longest_step_and_half_an_hour(
    tmp_path: Path, step_s: float, least: float
) -> None:
    watched, files = patience(tmp_path)
    rows, now_s = "", 0.0
    for step in range(5):
        now_s = (step + 1) * step_s
        files.metrics.write_text(rows := rows + row_of(step, step_s))
        assert watched.ended_by(now_s) is None
    assert least <= minutes_without_a_step(watched, now_s) <= least * (1 + 2 / CHECKS) + 5


def test_a_long_first_step_that_reports_how_far_it_is_is_no_stall(tmp_path: Path) -> None:
    watched, files = patience(tmp_path)
    with working(files):
        for minute in range(0, 300, 3):
            detail = f"{minute} of 300 done, {minute * 60} s"
            write_progress(files.status, Progress("running", "sample", 0, 10, 1, detail=detail))
            assert watched.ended_by(minute * 60.0) is None
        for minute in range(300, 400):  # only the time goes on
            detail = f"300 of 300 done, {minute * 60} s"
            write_progress(files.status, Progress("running", "sample", 0, 10, 1, detail=detail))
            if watched.ended_by(minute * 60.0) is RunState.STALLED:
                break
        assert 330 <= minute <= 340


def test_completions_that_are_scored_one_by_one_are_no_stall(tmp_path: Path) -> None:
    watched, files = patience(tmp_path, stall_timeout=80.0)
    with working(files):
        for second in range(0, 1000, 10):
            detail = f"{second} of 1000 scored, {second} s"
            write_progress(files.status, Progress("running", "reward", 3, 10, 1, detail=detail))
            assert watched.ended_by(float(second)) is None


def test_a_number_of_seconds_without_a_step_is_a_stall_whatever_is_sampled(tmp_path: Path) -> None:
    watched, files = patience(tmp_path, stall_timeout=80.0)
    ends = []
    with working(files):
        for second in range(0, 200, 10):
            detail = f"{second} of 1000 done"
            write_progress(files.status, Progress("running", "sample", 3, 10, 1, detail=detail))
            ends.append(watched.ended_by(float(second)))
    assert RunState.STALLED in ends
