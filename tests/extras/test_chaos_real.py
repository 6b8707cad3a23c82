"""Real kills of real processes, and more of the simulated ones than the core tests have time for."""

from __future__ import annotations

from pathlib import Path

from tests.chaos import PERMITS, Chaos
from tests.crash_run import power_losses, random_kills


def test_two_hundred_real_kills_lose_double_and_leak_nothing(tmp_path: Path) -> None:
    tally = Chaos(tmp_path.resolve(), seed=20).disturb(kills=200)
    assert tally.is_clean, tally
    assert tally.kills == 200
    assert min(tally.worker_kills, tally.orchestrator_kills) > 20
    assert 0 < tally.most_holders <= PERMITS


def test_four_thousand_plans_of_simulated_kills_cost_nothing(tmp_path: Path) -> None:
    verdict = random_kills(tmp_path, plans=4000, seed=21)
    assert verdict.problems == []
    assert verdict.kills > 4000


def test_a_thousand_power_losses_cost_nothing_that_was_synced(tmp_path: Path) -> None:
    assert power_losses(tmp_path, plans=1000, seed=22).problems == []
