"""Real kills in the middle of episodes."""

from __future__ import annotations

from pathlib import Path

from tests.episode_kills import kill_within_episodes


def test_runs_killed_within_episodes_equal_an_undisturbed_one(tmp_path: Path) -> None:
    found = kill_within_episodes(tmp_path, kills=30, seed=3)
    assert found.problems == []
    assert found.kills >= 30
    assert len(found.resumed_from) > 3  # from the beginning, and from checkpoints
