"""A campaign that runs is shown below its event lines, as its records say."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest
from rich.console import Console

from retrain.base.locks import hold
from retrain.campaign.endings import Ending
from retrain.cli.render.live import LiveView, StepLines
from retrain.cli.run import interruptible
from retrain.config.load import load_config
from retrain.plan.build import plan_runs
from retrain.plan.matrix import RunPlan
from retrain.records.layout import CampaignFiles
from retrain.records.run_state import Progress, RunState, begin_attempt, write_progress
from retrain.results.status.watch import Watcher
from tests.results.test_watch_reading import make_campaign, rows
from tests.semaphore_processes import wait_until


@pytest.fixture
def run(campaign_file: Path) -> RunPlan:
    return plan_runs(load_config(campaign_file)).runs[0]


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def view(out: io.StringIO) -> LiveView:
    return LiveView(Console(file=out, force_terminal=True, width=100, height=40))


def test_the_view_follows_what_runs_have_written(
    view: LiveView, run: RunPlan, out: io.StringIO, tmp_path: Path
) -> None:
    files = make_campaign(tmp_path)
    written = files.run("grpo_s1")
    with hold(files.lock), hold(written.lock), view:
        begin_attempt(written.attempts)
        rows(written, [3])
        view.begun(files, (run,), 2)
        wait_until(lambda: "3/10" in out.getvalue())
        rows(written, [4])
        wait_until(lambda: "4/10" in out.getvalue())


def test_records_are_not_followed_before_something_runs(view: LiveView, run: RunPlan, tmp_path: Path) -> None:
    """To read those of 4,000 finished runs takes longer than all else that `resume` does then."""
    view.begun(make_campaign(tmp_path), (), 2)
    assert view.watcher is None
    view.asked((run,))
    assert view.watcher is not None


def test_events_stand_above_the_view(view: LiveView, run: RunPlan, out: io.StringIO, tmp_path: Path) -> None:
    with view:
        view.begun(make_campaign(tmp_path), (run,), 2)
        view.started(run)
        view.ended(run, Ending(RunState.FAILED, "no such task"), ("the last line",))
    told = out.getvalue()
    assert f"started {run.title}" in told
    assert told.index("no such task") < told.index("the last line")


def test_a_run_that_is_tried_again_because_it_stalled_says_so(
    view: LiveView, run: RunPlan, out: io.StringIO
) -> None:
    saved = "stopped after step 80; a checkpoint was saved"
    view.retrying(run, Ending(RunState.STALLED, saved), 1.0)
    assert f"retrying {run.title} in 1.0 s: stalled; {saved}" in " ".join(out.getvalue().split())


def test_what_ctrl_c_does_stands_above_the_view(
    view: LiveView, out: io.StringIO, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not where the view is drawn, which would hide it at the next look."""
    stops: list[bool] = []
    with view, interruptible(stops.append, view.notice_soon, "saving", "killing"):
        view.begun(make_campaign(tmp_path), (), 1)
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
    told = [line for line in out.getvalue().splitlines() if "saving" in line or "killing" in line]
    assert ["saving" in line for line in told] == [True, False, False]
    assert stops == [False, True, True]
    assert capfd.readouterr().err == ""


def test_a_campaign_without_records_is_no_error(view: LiveView, run: RunPlan, tmp_path: Path) -> None:
    with view:
        view.begun(CampaignFiles(tmp_path / "nowhere"), (run,), 1)


def test_on_a_pipe_a_slow_step_has_a_line_and_no_minute_is_silent(out: io.StringIO, tmp_path: Path) -> None:
    files = make_campaign(tmp_path)
    run, now_s = files.run("grpo_s1"), [0.0]
    lines = StepLines(Console(file=out, width=100), clock=lambda: now_s[0])
    with hold(files.lock), hold(run.lock):
        begin_attempt(run.attempts)
        watcher = Watcher(files.directory)

        def told_after(seconds: float, step: int, detail: str = "") -> str:
            write_progress(run.status, Progress(RunState.RUNNING, "sample", step, 10, 1, detail=detail))
            now_s[0] += seconds
            before = len(out.getvalue())
            lines.show(watcher.refresh().campaigns[0])
            return out.getvalue()[before:].partition(" ")[2]

        assert told_after(0, step=1) == ""
        assert told_after(5, step=2) == ""
        assert told_after(5, step=3) == "grpo_s1 step 3/10, now: sample\n"
        assert told_after(50, step=3) == ""
        assert told_after(10, step=3, detail="7 of 8") == "grpo_s1 step 3/10, now: sample: 7 of 8\n"
