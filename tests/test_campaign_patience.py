"""How long a worker may take, and how long go without a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from retrain.campaign.endings import LOOKS, Patience
from retrain.config.campaign import Campaign
from retrain.locks.held import hold
from retrain.records.layout import RunFiles
from retrain.records.run_state import Progress, RunState, begin_attempt, write_progress


def patience(tmp_path: Path, **keys: float) -> tuple[Patience, RunFiles]:
    files = RunFiles(tmp_path)
    return Patience(Campaign(**keys), files, now_s=0.0), files  # type: ignore[arg-type]


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
        assert watched.ended_by(step * 80.0 / LOOKS) is None


def test_a_warm_up_that_goes_on_is_no_stall(tmp_path: Path) -> None:
    watched, files = patience(tmp_path, stall_timeout=80.0)
    for update in range(1, 100):
        files.warmup.write_text("row\n" * (update // 5 + 1))
        assert watched.ended_by(update * 80.0 / LOOKS) is None


def test_no_step_for_the_timeout_is_a_stall_noticed_soon(tmp_path: Path) -> None:
    watched, files = patience(tmp_path, stall_timeout=80.0)
    files.metrics.write_text("row\n")
    seen = []
    while not (seen and seen[-1][1]):
        seen.append((float(len(seen)), watched.ended_by(len(seen))))
    assert seen[-1][1] is RunState.STALLED
    assert 80.0 <= seen[-1][0] <= 80.0 * (1 + 2 / LOOKS)


def test_time_in_which_the_orchestrator_was_suspended_too_is_no_stall(tmp_path: Path) -> None:
    watched, files = patience(tmp_path, stall_timeout=80.0)
    files.metrics.write_text("row\n")
    looks = [0.0, 10.0, *(3600.0 + second for second in range(100))]
    stalled_at = [now_s for now_s in looks if watched.ended_by(now_s)]
    assert 3600.0 + 80.0 * (1 - 2 / LOOKS) <= stalled_at[0] <= 3600.0 + 80.0


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
