"""What the supervisor does with a launcher that keeps a queue of its own, as clusters do."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest

from retrain.base.errors import ClusterDownError, LaunchError, RecordsError
from retrain.base.locks import LockHolder, hold, holder
from retrain.campaign import Observer
from retrain.campaign.admission import as_planned
from retrain.campaign.endings import Ending
from retrain.campaign.launchers import Assignment, Begun, Ended
from retrain.campaign.orchestrate import Campaign
from retrain.campaign.run import start
from retrain.campaign.stop import stop_campaign
from retrain.campaign.supervise import Supervisor
from retrain.config.schema import CampaignSection
from retrain.plan.matrix import RunPlan
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.run_state import (
    Progress,
    RunState,
    begin_attempt,
    end_attempt,
    write_done,
    write_progress,
)
from retrain.records.rungs import write_wait

RETRIED_S = 15.0  # after so long, runs are tried or submitted again; a pause of all launches is longer


class Cluster:
    """A cluster that is told what happens, one thing each time the supervisor waits."""

    queues = True

    def __init__(self, *happenings: Callable[[], Sequence[Begun | Ended]], wait_s: float = RETRIED_S) -> None:
        self.happenings = list(happenings)
        self.now_s, self.wait_s = 0.0, wait_s
        self.submitted: list[list[str]] = []
        self.cancelled: list[str] = []
        self.refuses: list[Exception] = []

    def queued(self) -> Collection[str]:
        return ()

    def submit(self, run_ids: Sequence[str]) -> Collection[str]:
        if self.refuses:
            raise self.refuses.pop()
        self.submitted.append(list(run_ids))
        return run_ids

    def adopt(self, run_ids: Sequence[str]) -> None:
        pass

    def cancel(self, run_ids: Sequence[str], *, now: bool) -> None:
        self.cancelled += run_ids

    def wake(self) -> None:
        pass

    def poll(self, timeout_s: float) -> Sequence[Begun | Ended]:
        self.now_s += self.wait_s
        return self.happenings.pop(0)() if self.happenings else []


class Heard(Observer):
    def __init__(self) -> None:
        self.started_runs: list[str] = []
        self.notices: list[str] = []

    def started(self, run: RunPlan) -> None:
        self.started_runs.append(run.run_id)

    def notice(self, text: str) -> None:
        self.notices.append(text)


@pytest.fixture
def campaign(campaign_file: Path) -> Campaign:
    """Four runs that exist on disk and were never launched."""
    return start(campaign_file)


def supervisor(
    cluster: Cluster, campaign: Campaign, heard: Heard | None = None, workers: int = 4, **keys: object
) -> Supervisor:
    table = CampaignSection(**keys)  # type: ignore[arg-type]
    observer = heard or Heard()
    return Supervisor(
        table, as_planned(workers), cluster, campaign.files_of, observer, clock=lambda: cluster.now_s
    )


def done(files: RunFiles, run: RunPlan) -> Ended:
    write_done(files.done, run.config_hash, {})
    return Ended(run.run_id, None)


def all_done(campaign: Campaign) -> list[Ended]:
    return [done(campaign.files_of(run.run_id), run) for run in campaign.plan.runs]


def interrupted(files: RunFiles, run: RunPlan, step: int) -> Ended:
    """What a time limit does to a worker that had come to a step."""
    attempt = begin_attempt(files.attempts)
    write_progress(files.status, Progress("interrupted", "", step, 4, attempt))
    end_attempt(files.attempts, attempt, "interrupted", exit_code=130)
    return Ended(run.run_id, None, "TIMEOUT", cut_short=True)


def test_all_runs_are_handed_over_at_once(campaign: Campaign) -> None:
    cluster = Cluster(lambda: all_done(campaign))
    endings = supervisor(cluster, campaign).supervise(campaign.plan.runs)
    assert cluster.submitted == [[run.run_id for run in campaign.plan.runs]]
    assert set(endings.values()) == {Ending(RunState.DONE)}


def test_a_run_counts_as_started_when_the_cluster_says_so(campaign: Campaign) -> None:
    first, heard = campaign.plan.runs[0].run_id, Heard()
    cluster = Cluster(lambda: [Begun(first)], lambda: all_done(campaign))
    supervisor(cluster, campaign, heard).supervise(campaign.plan.runs)
    assert heard.started_runs == [first]


def test_waiting_in_the_queue_is_not_running_late(campaign: Campaign) -> None:
    cluster = Cluster(list, list, lambda: all_done(campaign))
    supervisor(cluster, campaign, run_timeout=1e-9).supervise(campaign.plan.runs)
    assert cluster.cancelled == []


@pytest.mark.parametrize("phase", ["API paused", "sample"])
def test_a_run_that_waits_for_the_permit_of_a_paused_call_is_not_stalled(
    campaign: Campaign, phase: str
) -> None:
    runs = campaign.plan.runs
    files = campaign.files_of(runs[0].run_id)
    lock = hold(files.lock)
    assert lock is not None
    attempt = begin_attempt(files.attempts)
    write_progress(files.status, Progress("running", phase, 1, 4, attempt))

    def all_end() -> list[Ended]:
        lock.release()
        return all_done(campaign)

    cluster = Cluster(lambda: [Begun(run.run_id) for run in runs], *[list] * 20, all_end, wait_s=5.0)
    supervisor(cluster, campaign, stall_timeout=40.0).supervise(runs)
    assert set(cluster.cancelled) == (set() if phase == "API paused" else {run.run_id for run in runs})


def test_a_retry_waits_until_it_would_not_stand_in_the_queue(campaign: Campaign) -> None:
    first, *rest = campaign.plan.runs
    cluster = Cluster(
        lambda: [Ended(first.run_id, None, "NODE_FAIL")],
        list,
        lambda: [done(campaign.files_of(run.run_id), run) for run in rest],
        lambda: [done(campaign.files_of(first.run_id), first)],
    )
    supervisor(cluster, campaign, workers=2).supervise(campaign.plan.runs)
    assert [len(batch) for batch in cluster.submitted] == [4, 1]


@pytest.mark.parametrize("is_lost", [True, False])
def test_runs_lost_with_one_machine_are_tried_again_without_a_pause(
    is_lost: bool, campaign: Campaign
) -> None:
    runs, heard = campaign.plan.runs, Heard()
    lost = [Ended(run.run_id, None, "NODE_FAIL", is_lost=is_lost) for run in runs]
    cluster = Cluster(lambda: lost, list, lambda: all_done(campaign) if len(cluster.submitted) == 2 else [])
    made = supervisor(cluster, campaign, heard, pause_after=3)
    cluster.happenings.append(lambda: made.stop() or [])  # type: ignore[func-returns-value]
    made.supervise(runs)
    assert [len(batch) for batch in cluster.submitted] == ([4, 4] if is_lost else [4])
    assert any("failed for infrastructure" in notice for notice in heard.notices) is not is_lost


def test_after_a_pause_one_run_is_handed_over_before_the_others(campaign: Campaign) -> None:
    runs = campaign.plan.runs
    cluster = Cluster(
        lambda: [Ended(run.run_id, None, "no network") for run in runs],
        list,  # the pause of a minute is over
        *[list] * 5,  # the probe waits in the cluster's queue
        lambda: [Begun(cluster.submitted[1][0])] if len(cluster.submitted) == 2 else [],
        list,
        list,  # the probe has lived for two minutes
        lambda: all_done(campaign) if len(cluster.submitted) == 3 else [],
        wait_s=61.0,
    )
    heard = Heard()
    supervisor(cluster, campaign, heard, pause_after=3).supervise(runs)
    assert [len(batch) for batch in cluster.submitted] == [4, 1, 3]
    assert heard.started_runs == cluster.submitted[1]


def test_a_probe_that_is_cancelled_by_hand_leaves_its_place_to_another(campaign: Campaign) -> None:
    runs = {run.run_id: run for run in campaign.plan.runs}

    def finish_last() -> list[Ended]:
        return [done(campaign.files_of(run_id), runs[run_id]) for run_id in cluster.submitted[-1]]

    cluster = Cluster(
        lambda: [Ended(run_id, None, "no network") for run_id in runs],
        list,  # the pause of a minute is over
        lambda: [Ended(cluster.submitted[1][0], None, taken_back=True)],
        finish_last,
        finish_last,
        wait_s=61.0,
    )
    supervisor(cluster, campaign, pause_after=3).supervise(campaign.plan.runs)
    assert [len(batch) for batch in cluster.submitted] == [4, 1, 1, 2]


def test_a_time_limit_is_no_try_while_steps_are_made(campaign: Campaign) -> None:
    run = campaign.plan.runs[0]
    files = campaign.files_of(run.run_id)
    cut_short = [lambda: [interrupted(files, run, step=2)], list] * 3
    cluster = Cluster(*cut_short, lambda: [done(files, run)])
    endings = supervisor(cluster, campaign, retries=0).supervise([run])
    assert endings[run.run_id] == Ending(RunState.DONE)
    assert len(cluster.submitted) == 4


def test_a_time_limit_too_short_for_a_step_ends_after_the_retries(campaign: Campaign) -> None:
    run = campaign.plan.runs[0]
    files = campaign.files_of(run.run_id)
    cluster = Cluster(*[lambda: [interrupted(files, run, step=0)], list] * 2)
    endings = supervisor(cluster, campaign, retries=1).supervise([run])
    assert endings[run.run_id].state is RunState.INTERRUPTED
    assert len(cluster.submitted) == 2


def test_the_clusters_reason_is_told_where_the_worker_left_none(campaign: Campaign) -> None:
    run = campaign.plan.runs[0]
    cluster = Cluster(lambda: [Ended(run.run_id, None, "Slurm says NODE_FAIL")])
    endings = supervisor(cluster, campaign, retries=0).supervise([run])
    assert endings[run.run_id] == Ending(RunState.INFRASTRUCTURE, "Slurm says NODE_FAIL")


def test_who_cancelled_a_run_in_the_cluster_is_told_but_not_of_a_stop_of_our_own(
    campaign: Campaign,
) -> None:
    by_hand, by_us, *_ = campaign.plan.runs
    why = "Slurm ended task 7_0: CANCELLED"
    cluster = Cluster(
        lambda: [Ended(by_hand.run_id, None, why, taken_back=True)],
        lambda: made.stop() or [],  # type: ignore[func-returns-value]
        lambda: [Ended(by_us.run_id, None, why, taken_back=True)],
    )
    made = supervisor(cluster, campaign)
    endings = made.supervise([by_hand, by_us])
    assert endings[by_hand.run_id] == Ending(RunState.INTERRUPTED, why)
    assert endings[by_us.run_id] == Ending(RunState.INTERRUPTED)


def test_a_cluster_that_refuses_ends_the_campaign_with_its_reason(campaign: Campaign) -> None:
    cluster = Cluster()
    cluster.refuses = [LaunchError("invalid partition")]
    with pytest.raises(LaunchError, match="invalid partition"):
        supervisor(cluster, campaign).supervise(campaign.plan.runs)


def test_a_cluster_that_never_answered_ends_the_campaign(campaign: Campaign) -> None:
    cluster = Cluster()
    cluster.refuses = [ClusterDownError("no answer")]
    with pytest.raises(ClusterDownError):
        supervisor(cluster, campaign).supervise(campaign.plan.runs)


def full_disk() -> RecordsError:
    error = RecordsError("no answer: cannot write (no space left)")
    error.__cause__ = OSError(errno.ENOSPC, "no space left")
    return error


@pytest.mark.parametrize("trouble", [ClusterDownError("no answer"), full_disk()])
def test_a_cluster_that_falls_silent_or_a_full_disk_is_waited_for(
    trouble: Exception, campaign: Campaign
) -> None:
    first, *rest = campaign.plan.runs
    heard = Heard()

    def falls_silent() -> Sequence[Ended]:
        cluster.refuses = [trouble]
        return [Ended(first.run_id, None, "lost")]

    cluster = Cluster(falls_silent, list, list, lambda: all_done(campaign))
    endings = supervisor(cluster, campaign, heard).supervise(campaign.plan.runs)
    assert {ending.state for ending in endings.values()} == {RunState.DONE}
    assert cluster.submitted[1:] == [[first.run_id]]
    assert any("no answer" in notice for notice in heard.notices)
    assert len(rest) == 3


SEEN: list[LockHolder | None] = []


def open_watching(assignment: Assignment) -> Cluster:
    """Return a cluster that notes who holds the campaign while it is asked for what waits."""
    cluster, lock = Cluster(), CampaignFiles(assignment.directory).lock
    cluster.queued = lambda: SEEN.append(holder(lock)) or ()  # type: ignore[func-returns-value, method-assign]
    return cluster


def test_other_machines_see_a_stop_that_waits_for_an_engine(campaign_file: Path) -> None:
    SEEN.clear()
    launcher = f"{__name__}.open_watching"
    stop_campaign(start(campaign_file, [f'campaign.launcher="{launcher}"']).directory, launcher=launcher)
    assert [found is not None and found.renewed_at > 0 for found in SEEN] == [True]


def test_a_run_that_waits_for_a_search_was_not_cut_short(campaign: Campaign) -> None:
    run = campaign.plan.runs[0]
    files = campaign.files_of(run.run_id)
    write_wait(files.rung, 2)
    cluster = Cluster(lambda: [interrupted(files, run, 2)], lambda: made.stop() or [])  # type: ignore[func-returns-value]
    made = supervisor(cluster, campaign)
    assert made.supervise([run])[run.run_id].state is RunState.INTERRUPTED
    assert cluster.submitted == [[run.run_id]]
    write_wait(files.rung, 0)
    cluster.happenings = [lambda: [done(files, run)]]
    assert made.supervise([run])[run.run_id].state is RunState.DONE
    assert len(cluster.submitted) == 2
