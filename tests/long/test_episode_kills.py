"""Real kills in the middle of episodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.episode_kills import TABLES, kill_within_episodes

KILLS = {"plain": 12}


@pytest.mark.parametrize("way", TABLES)
def test_runs_killed_within_episodes_equal_an_undisturbed_one(tmp_path: Path, way: str) -> None:
    kills = KILLS.get(way, 5)
    found = kill_within_episodes(tmp_path, kills, seed=3, way=way)
    assert found.problems == []
    assert found.kills >= kills
    assert len(found.resumed_from) > 3  # from the beginning, and from checkpoints
