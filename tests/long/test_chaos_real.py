"""Real kills of real processes; `benchmarks.chaos` sends thousands."""

from __future__ import annotations

from pathlib import Path

from tests.chaos import PERMITS, Chaos


def test_two_dozen_real_kills_lose_double_and_leak_nothing(tmp_path: Path) -> None:
    tally = Chaos(tmp_path.resolve(), seed=20).disturb(kills=24)
    assert tally.is_clean, tally
    assert tally.kills == 24
    assert min(tally.worker_kills, tally.orchestrator_kills) > 4
    assert 0 < tally.most_holders <= PERMITS
