"""What the supervisor does with workers that hang, fail in a row, find no memory or turn up late."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_RECORDS, records_error
from retrain.base.locks import hold
from retrain.campaign import Observer, supervise
from retrain.campaign.admission import as_planned, by_memory
from retrain.campaign.endings import Ending
from retrain.campaign.launchers import Ended
from retrain.campaign.run import run_campaign, start
from retrain.campaign.supervise import Supervisor
from retrain.config.schema import CampaignSection
from retrain.plan.matrix import RunPlan
from retrain.records.layout import RunFiles
from retrain.records.run_state import RunState, begin_attempt, read_attempts, write_done

ROOT = Path(__file__).parents[2]
NOBODY = 65534
RETRIED_S = 15.0  # any retry below is due after so long


@pytest.fixture(autouse=True)
def _plugins_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT))


class Script:
    """A launcher that does what it is told, one thing each time the supervisor waits."""

    queues = False

    def __init__(self, *happenings: Callable[[], Sequence[Ended]], waits_s: float = RETRIED_S) -> None:
        self.happenings = list(happenings)
        self.calls: list[tuple[str, str]] = []
        self.now_s, self.waits_s = 0.0, waits_s

    def queued(self) -> Collection[str]:
        return ()

    def submit(self, run_ids: Sequence[str]) -> Collection[str]:
        self.calls += [("submit", run_id) for run_id in run_ids]
        return run_ids

    def adopt(self, run_ids: Sequence[str]) -> None:
        self.calls += [("adopt", run_id) for run_id in run_ids]

    def cancel(self, run_ids: Sequence[str], *, now: bool) -> None:
        self.calls += [("kill" if now else "cancel", run_id) for run_id in run_ids]

    def wake(self) -> None:
        pass

    def poll(self, timeout_s: float) -> Sequence[Ended]:
        self.now_s += self.waits_s
        return self.happenings.pop(0)() if self.happenings else []


@pytest.fixture
def planned(campaign_file: Path) -> tuple[RunPlan, RunFiles]:
    """A run that exists on disk and was never launched."""
    campaign = start(campaign_file)
    run = campaign.plan.runs[0]
    return run, campaign.files_of(run.run_id)


@pytest.fixture
def reachable_run(campaign_file: Path) -> Iterator[RunFiles]:
    """A run that belongs to nobody, in a directory to which nothing on the way is closed for others."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        own = "training.eval_at_start=false"  # what runs share is made by who runs first
        campaign = start(campaign_file, [f'logging.log_dir="{place}/logs"', own])
        for path in (Path(place), *Path(place).rglob("*")):
            os.geteuid() or os.chown(path, NOBODY, NOBODY)
        yield campaign.files_of(campaign.plan.runs[0].run_id)


def supervisor(launcher: Script, files: RunFiles, **keys: object) -> Supervisor:
    return supervisor_of(launcher, lambda run_id: files, 4, **keys)


def supervisor_of(
    launcher: Script, files_of: Callable[[str], RunFiles], workers: int, **keys: object
) -> Supervisor:
    campaign, admission = CampaignSection(**keys), as_planned(workers)  # type: ignore[arg-type]
    return Supervisor(campaign, admission, launcher, files_of, Observer(), clock=lambda: launcher.now_s)


# A worker that a dead orchestrator had started, slower than ours


def test_a_run_that_somebody_else_took_first_is_adopted(planned: tuple[RunPlan, RunFiles]) -> None:
    run, files = planned
    other = hold(files.lock)
    assert other is not None

    def ours_finds_the_lock_held() -> Sequence[Ended]:
        begin_attempt(files.attempts)
        return [Ended(run.run_id, 75)]

    def the_other_is_done() -> Sequence[Ended]:
        write_done(files.done, run.config_hash, {})
        other.release()
        return [Ended(run.run_id, None)]

    script = Script(ours_finds_the_lock_held, the_other_is_done)
    endings = supervisor(script, files).supervise([run])
    assert endings == {run.run_id: Ending(RunState.DONE)}
    assert script.calls == [("submit", run.run_id), ("adopt", run.run_id)]
    assert len(read_attempts(files.attempts)) == 1


def test_a_worker_that_turns_up_while_a_campaign_stops_is_asked_to_leave_as_well(
    planned: tuple[RunPlan, RunFiles],
) -> None:
    run, files = planned
    other = hold(files.lock)
    assert other is not None
    stopping: Supervisor

    def nothing() -> Sequence[Ended]:
        stopping.stop()
        return []

    def ours_finds_the_lock_held() -> Sequence[Ended]:
        return [Ended(run.run_id, 75)]

    def the_other_leaves_if_asked() -> Sequence[Ended]:
        assert script.calls[-1] == ("cancel", run.run_id)
        other.release()
        return [Ended(run.run_id, None)]

    script = Script(nothing, ours_finds_the_lock_held, the_other_leaves_if_asked)
    stopping = supervisor(script, files)
    assert stopping.supervise([run])[run.run_id].state is RunState.INTERRUPTED
    assert [what for what, _ in script.calls] == ["submit", "cancel", "adopt", "cancel"]


# Endings


def test_a_worker_ended_by_a_real_time_signal_ends_no_campaign(planned: tuple[RunPlan, RunFiles]) -> None:
    run, files = planned
    endings = supervisor(Script(lambda: [Ended(run.run_id, -40)]), files, retries=0).supervise([run])
    assert endings[run.run_id] == Ending(RunState.INFRASTRUCTURE, "the worker was killed by signal 40")


@pytest.mark.parametrize(("number", "tries"), [(errno.EACCES, 1), (errno.ENOSPC, 3)])
def test_a_run_is_not_tried_again_where_it_is_forbidden_but_where_there_may_be_space_again(
    number: int, tries: int, planned: tuple[RunPlan, RunFiles]
) -> None:
    run, files = planned
    script, tried = Script(), []

    def refuse(run_ids: Sequence[str]) -> Collection[str]:
        tried.extend(run_ids)
        error = OSError(number, os.strerror(number))
        raise records_error(files.output_log, "append to", error) from error

    script.submit = refuse  # type: ignore[method-assign]
    ended = supervisor(script, files, retries=2).supervise([run])[run.run_id]
    assert len(tried) == tries
    assert ended.state is RunState.INFRASTRUCTURE
    assert str(files.output_log) in ended.message


@pytest.mark.parametrize(("mode", "doing"), [(0o500, "write the checkpoint"), (0, "look for a checkpoint")])
def test_a_worker_that_may_not_go_on_names_the_directory_and_how_to_fix_it(
    mode: int, doing: str, reachable_run: RunFiles
) -> None:
    code = (
        "import os, sys, threading; from pathlib import Path; from retrain.trainer.worker import run\n"
        "run(Path(sys.argv[2]), threading.Event())  # nobody may not import what root installed\n"
        f"os.geteuid() or os.setuid({NOBODY})\n"
        f"(Path(sys.argv[1]) / 'checkpoints').mkdir(mode={mode})\n"
        "raise SystemExit(run(Path(sys.argv[1]), threading.Event()))\n"
    )
    directories = [reachable_run.directory, reachable_run.directory.with_name("grpo_s1")]
    command = [sys.executable, "-c", code, *map(str, directories)]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    reachable_run.checkpoints.chmod(0o700)
    assert done.returncode == EXIT_RECORDS
    assert f"cannot {doing} (Permission denied); make it readable and writable for this user" in done.stderr
    assert str(reachable_run.checkpoints) in done.stderr


# Order


def test_a_waiting_run_takes_the_place_of_one_that_is_delayed_which_then_comes_before_the_others(
    campaign_file: Path,
) -> None:
    campaign = start(campaign_file)
    first, second, third, _ = runs = campaign.plan.runs

    def ends(run: RunPlan, exit_code: int) -> Callable[[], Sequence[Ended]]:
        def happening() -> Sequence[Ended]:
            if exit_code == 0:
                write_done(campaign.files_of(run.run_id).done, run.config_hash, {})
            return [Ended(run.run_id, exit_code)]

        return happening

    script = Script(ends(first, -9), *(ends(run, 0) for run in (second, first, third, runs[3])))
    supervisor_of(script, campaign.files_of, 1).supervise(runs)
    order = [run_id for what, run_id in script.calls if what == "submit"]
    assert order == [run.run_id for run in (first, second, first, third, runs[3])]


# Time


def test_a_worker_without_a_step_for_stall_timeout_is_asked_then_killed(
    planned: tuple[RunPlan, RunFiles],
) -> None:
    run, files = planned
    killed = [Ended(run.run_id, -signal.SIGKILL)]
    script = Script(*[list] * 12, lambda: killed, waits_s=4.0)  # a longer one is a suspension
    endings = supervisor(script, files, stall_timeout=1e-6, retries=0).supervise([run])
    assert endings[run.run_id] == Ending(RunState.STALLED, "no step within [campaign].stall_timeout")
    assert [what for what, _ in script.calls] == ["submit", "cancel", "kill"]


def test_a_hanging_run_is_ended_and_tried_again(
    campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.1)
    text = campaign_file.read_text() + '[reward]\nreward = "tests.plugins.hangs_once"\n'
    campaign_file.write_text(text + f'[reward.params]\nflag = "{here / "hung"}"\n')
    # enough for a worker to start on a busy machine, which is no step
    sets = ["campaign.stall_timeout=12.0", "campaign.seeds=[0]", "campaign.retries=20"]
    outcome = run_campaign(campaign_file, sets)
    assert outcome.exit_code == 0
    endings = [
        attempt.ending
        for run in (outcome.directory / "runs").iterdir()
        for attempt in read_attempts(RunFiles(run).attempts)
    ]
    assert set(endings) == {"done", "stalled"}


def test_memory_that_stays_short_is_told_of_once_whatever_the_figures(
    planned: tuple[RunPlan, RunFiles],
) -> None:
    run, files = planned
    notices: list[str] = []
    free_bytes = iter(range(2**28, 2**30, 2**24))

    class Listening(Observer):
        def notice(self, text: str) -> None:
            notices.append(text)

    admission = by_memory(as_planned(4), 2**31, lambda: next(free_bytes))
    script = Script(*[list] * 10, lambda: waiting.stop() or [])
    waiting = Supervisor(CampaignSection(), admission, script, lambda run_id: files, Listening())
    waiting.supervise([run])
    assert len(notices) == 1
    assert "0.25 GiB of memory are free" in notices[0]
