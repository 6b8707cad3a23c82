"""Real kills of real processes."""

from __future__ import annotations

from pathlib import Path

from tests.chaos import PERMITS, Chaos


def test_two_hundred_real_kills_lose_double_and_leak_nothing(tmp_path: Path) -> None:
    tally = Chaos(tmp_path.resolve(), seed=20).disturb(kills=200)
    assert tally.is_clean, tally
    assert tally.kills == 200
    assert min(tally.worker_kills, tally.orchestrator_kills) > 20
    assert 0 < tally.most_holders <= PERMITS
