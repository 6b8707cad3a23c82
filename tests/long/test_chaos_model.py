"""A campaign against a plain model: whatever happens in whatever order, each run's steps are done once."""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from retrain.campaign import supervise as retries
from retrain.campaign.orchestrate import Campaign, CampaignOutcome
from retrain.campaign.run import reopen, start
from retrain.control.semaphore import FileSemaphore
from retrain.records.campaign_state import ask_to_stop
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.run_state import RunState, read_attempts
from tests.conftest import TINY
from tests.scanned import scan_metrics
from tests.world import WORLDS, OrchestratorKilled, World

RUNS = ("grpo_s0", "maxrl_s0", "grpo_s1", "maxrl_s1")
STEPS, WORKERS, PERMITS = 4, 2, 4
MEMORY = Path("/dev/shm")


class CampaignMachine(RuleBasedStateMachine):
    """The world is told what happens; the model keeps what must be on disk for it."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(retries, "FIRST_RETRY_S", 0.0)
        self.patch.chdir(self.directory)
        self.world = World()
        WORLDS.append(self.world)
        self.rows = dict.fromkeys(RUNS, 0)  # steps that a reader must see
        self.saved = dict.fromkeys(RUNS, 0)
        self.attempts = dict.fromkeys(RUNS, 0)
        self.permits = PERMITS
        self.is_stopping = False
        self.outcome: CampaignOutcome | None = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    @initialize()
    def begin(self) -> None:
        text = TINY.replace("max_workers = 2", f"max_workers = {WORKERS}\nretries = 100\npause_after = 0")
        path = self.directory / "tiny.toml"
        path.write_text(text)
        campaign = start(path, ["campaign.launcher=tests.world.open_launcher"])
        self.campaign = campaign.directory.absolute()
        self.supervise(campaign)

    def supervise(self, campaign: Campaign) -> None:
        before = len(self.world.started)
        self.outcome = None
        self.is_stopping = False

        def execute() -> None:
            try:
                self.outcome = campaign.execute()
            except OrchestratorKilled:
                pass
            except BaseException as error:  # noqa: BLE001 - for the test's own thread
                self.error = error
            self.world.orchestrator_left()

        self.thread = threading.Thread(target=execute, daemon=True)  # a failure must not wait for it
        self.thread.start()
        self.world.await_orchestrator()
        self.count_started(before)

    def order(self, what: object) -> None:
        before = len(self.world.started)
        self.world.order(what)  # type: ignore[arg-type]
        self.count_started(before)

    def count_started(self, before: int) -> None:
        for run_id in self.world.started[before:]:
            self.attempts[run_id] += 1
            assert self.world.alive[run_id].step == self.saved[run_id]

    def chosen(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.world.alive)))

    def is_supervised(self) -> bool:
        return self.thread is not None and self.thread.is_alive() and self.outcome is None

    def has_workers(self) -> bool:
        return self.is_supervised() and bool(self.world.alive)

    def supervised_step(self, run_id: str) -> None:
        self.expect_step(run_id)
        self.order(lambda: self.world.step(run_id))

    def expect_step(self, run_id: str) -> None:
        worker = self.world.alive[run_id]
        if worker.asked_to_leave:  # rows after the checkpoint that it came from are shown until taken again
            self.saved[run_id] = worker.step
            return
        self.rows[run_id] = step = worker.step + 1
        if step % 2 == 0:
            self.saved[run_id] = step

    @precondition(has_workers)
    @rule(data=st.data())
    def a_worker_takes_a_step(self, data: st.DataObject) -> None:
        self.supervised_step(self.chosen(data))

    @precondition(has_workers)
    @rule(data=st.data(), while_writing=st.booleans())
    def a_worker_is_killed(self, data: st.DataObject, while_writing: bool) -> None:
        run_id = self.chosen(data)
        self.order(lambda: self.world.kill(run_id, while_writing=while_writing))

    @precondition(lambda self: self.has_workers() and not self.is_stopping)
    @rule()
    def somebody_asks_to_stop(self) -> None:
        started = len(self.world.started)
        self.order(lambda: ask_to_stop(CampaignFiles(self.campaign), now=False))
        self.is_stopping = True
        assert all(worker.asked_to_leave for worker in self.world.alive.values())
        assert len(self.world.started) == started

    @precondition(lambda self: self.has_workers() and not self.is_stopping)
    @rule(data=st.data())
    def the_disk_fills_up(self, data: st.DataObject) -> None:
        run_id = self.chosen(data)
        self.order(lambda: self.world.step_on_a_full_disk(run_id))

    @precondition(has_workers)
    @rule(data=st.data(), steps=st.integers(0, 2))
    def the_orchestrator_is_killed_and_the_campaign_resumed(self, data: st.DataObject, steps: int) -> None:
        self.order(self.world.kill_orchestrator)
        assert self.thread is not None
        self.thread.join()
        for _ in range(steps):  # workers go on without it
            if self.world.alive:
                run_id = self.chosen(data)
                self.expect_step(run_id)
                self.world.step(run_id)
        self.world.ended_runs.clear()  # nobody was there to see it
        self.permits = PERMITS  # the file says how many
        self.supervise(reopen(self.campaign))

    @precondition(is_supervised)
    @rule(permits=st.integers(1, 8))
    def the_permits_are_changed(self, permits: int) -> None:
        FileSemaphore(self.campaign / "permits", permits, allow_unshared=True).set_permits(permits)
        self.permits = permits

    @precondition(lambda self: not self.is_supervised())
    @rule()
    def an_ended_campaign_is_resumed(self) -> None:
        outcome = self.ended()
        left = {run_id for run_id, state in outcome.states.items() if state is not RunState.DONE}
        assert left == {run_id for run_id in RUNS if self.rows[run_id] < STEPS}
        assert outcome.exit_code == (130 if left else 0)
        self.permits = PERMITS
        before = len(self.world.started)
        self.supervise(reopen(self.campaign))
        assert set(self.world.started[before:]) == set(sorted(left, key=RUNS.index)[:WORKERS])

    def ended(self) -> CampaignOutcome:
        assert self.thread is not None
        self.thread.join()
        assert self.error is None
        assert self.outcome is not None
        return self.outcome

    @invariant()
    def what_is_read_is_what_was_done(self) -> None:
        if not hasattr(self, "campaign"):
            return
        assert self.error is None
        for run_id in RUNS:
            files = RunFiles(self.campaign / "runs" / run_id)
            scan = scan_metrics(files.directory)
            assert [row["step"] for row in scan.rows] == list(range(1, self.rows[run_id] + 1))
            numbers = [attempt.number for attempt in read_attempts(files.attempts)]
            assert numbers == list(range(1, self.attempts[run_id] + 1))
        assert self.world.most_alive <= WORKERS
        assert FileSemaphore.inspect(self.campaign / "permits").permits == self.permits

    def teardown(self) -> None:
        try:
            if hasattr(self, "campaign"):
                self.finish()
        finally:
            self.patch.undo()
            WORLDS.remove(self.world)
            shutil.rmtree(self.directory)

    def finish(self) -> None:
        self.finish_what_runs()
        if self.ended().exit_code:  # it was stopped
            self.supervise(reopen(self.campaign))
            self.finish_what_runs()
        assert set(self.ended().states.values()) == {RunState.DONE}
        for run_id in RUNS:
            scan = scan_metrics(self.campaign / "runs" / run_id)
            assert ([row["step"] for row in scan.rows], scan.skipped_lines) == ([1, 2, 3, 4], 0)

    def finish_what_runs(self) -> None:
        while self.is_supervised() and self.world.alive:
            self.supervised_step(min(self.world.alive))


TestCampaignMachine = CampaignMachine.TestCase
TestCampaignMachine.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
