"""More simulated kills and power losses than the core tests have time for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash_run import power_losses, random_kills

MEMORY = Path("/dev/shm")  # the disk is a simulated one: what carries it should be quick


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else tmp_path) as directory:
        yield Path(directory)


def test_a_thousand_plans_of_simulated_kills_cost_nothing(scratch: Path) -> None:
    verdict = random_kills(scratch, plans=1000, seed=21)
    assert verdict.problems == []
    assert verdict.kills > 1000


def test_three_hundred_power_losses_cost_nothing_that_was_synced(scratch: Path) -> None:
    assert power_losses(scratch, plans=300, seed=22).problems == []
