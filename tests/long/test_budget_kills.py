"""A budget holds against a server's own bill while workers are killed; `benchmarks.budget` kills more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.budget_kills import RUNS, kill_with_budget
from tests.tinker_api.running import KEY, ROOT


def test_the_bill_never_exceeds_the_budget_by_more_than_a_step_of_each_worker(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    found = kill_with_budget(here, kills=8, seed=1, kills_per_stop=4)
    assert found.kills >= 8
    for stop in found.stops:
        assert stop.steps_over <= RUNS
        assert stop.known_usd <= stop.billed_usd * (1 + 1e-9)
        assert stop.billed_usd <= stop.at_most_usd * (1 + 1e-9)
        assert stop.at_most_usd > 0.3 * stop.budget_usd  # it was used
