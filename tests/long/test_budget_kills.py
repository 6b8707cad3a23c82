"""A budget holds against a server's own bill while processes are killed; `benchmarks.budget` kills more."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_INTERRUPTED
from retrain.base.locks import is_held, signal_holder
from retrain.campaign.run import reopen
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.metrics import read_metrics
from tests.budget_kills import (
    ALPHABET,
    SET_ASIDE_USD,
    STEP_USD,
    WORKERS,
    Stop,
    kill_with_budget,
    run_id,
    stop_of,
    write_campaign,
)
from tests.tinker_api.running import KEY, WORKERS_PATH, RunningServer, serve


def check(stop: Stop, workers: int = WORKERS) -> None:
    assert stop.steps_over <= workers
    assert stop.known_usd <= stop.billed_usd * (1 + 1e-9)
    assert stop.billed_usd <= stop.at_most_usd * (1 + 1e-9)
    assert stop.at_most_usd > stop.budget_usd - workers * SET_ASIDE_USD  # it was used


@pytest.mark.timeout(600)
def test_the_bill_never_exceeds_the_budget_by_more_than_a_step_of_each_worker(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not rollouts are sampled ahead."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("PYTHONPATH", WORKERS_PATH)
    # forks of a process that has called the API cannot, and other tests of this process may have
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        for staleness in (0, 4):
            root = here / str(staleness)
            root.mkdir()
            found = fresh.submit(
                kill_with_budget, root, kills=4, seed=1, kills_per_stop=2, staleness=staleness
            ).result()
            assert found.kills >= 4
            assert len(found.stops) > 1
            for stop in found.stops:
                check(stop)


@pytest.fixture
def server(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    yield from serve(here, monkeypatch, ALPHABET)


def await_that(is_so: Callable[[], bool]) -> None:
    while not is_so():  # the test's own limit ends it
        time.sleep(0.05)


def steps_of(run: RunFiles) -> int:
    return len(read_metrics(run.directory)) if run.metrics.exists() else 0


@pytest.mark.timeout(600)
def test_a_budget_holds_after_the_orchestrator_was_killed(here: Path, server: RunningServer) -> None:
    """Of its two workers one goes on and the other is killed as well; resume adopts the first."""
    file, budget_usd = write_campaign(here, server, 2, steps=10**6), 120 * STEP_USD
    file.write_text(file.read_text() + "parallel = true\n")
    command = [sys.executable, "-m", "retrain", "run", str(file), f"--budget-usd={budget_usd}"]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    await_that(lambda: len([*here.glob("logs/*/runs/*/metrics.jsonl")]) == 2)
    files = CampaignFiles(next(here.glob("logs/*")))
    killed, other = (files.run(run_id(seed)) for seed in (0, 1))
    await_that(lambda: min(map(steps_of, (killed, other))) > 0)
    started.send_signal(signal.SIGKILL)
    started.wait()
    before = steps_of(other)
    signal_holder(killed.lock, signal.SIGKILL)
    await_that(lambda: steps_of(other) > before)
    assert reopen(files.directory).execute().exit_code == EXIT_INTERRUPTED
    assert not any(is_held(run.lock) for run in (killed, other))
    check(stop_of(server, files, budget_usd), workers=2)
