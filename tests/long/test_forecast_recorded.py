"""What is foretold of real campaigns at moments of theirs: 24 runs on 16 workers that shared two cores.

`data/crowded_campaigns.json` holds when each run began, reached some of its steps and ended, in seconds. The
machine, a virtual one that was otherwise idle, was up to a sixth faster at some times than at others.
"""

from __future__ import annotations

import bisect
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from retrain.plan.estimate.remaining import Remaining, remaining
from retrain.plan.estimate.workload import on_cores
from retrain.records.metrics import MetricsEnds
from retrain.records.run_row import RunRow, pace_of
from retrain.records.run_state import Attempt, RunState
from tests.recorded import at

DATA = json.loads((Path(__file__).parents[1] / "data" / "crowded_campaigns.json").read_text())
STEPS = 800


@dataclass(frozen=True)
class Lived:
    """A run: when it began, ended, and took each step."""

    name: str
    condition: str
    began_s: float
    ended_s: float
    steps_s: list[float]

    def row(self, now_s: float) -> RunRow:
        """Return what its records said at some time."""
        taken = bisect.bisect_right(self.steps_s, now_s)
        state = RunState.PENDING if now_s < self.began_s else RunState.RUNNING
        rows = [self._record(step) for step in range(max(1, taken - 4), taken + 1)]
        middle = taken // 2 + 1
        ends = MetricsEnds(self._record(1), rows, self._record(middle) if middle < taken else None)
        pace = pace_of(ends, [Attempt(1, 7, "here", at(self.began_s), 0)]) if rows else None
        return RunRow(
            run_id=self.name,
            condition=self.condition,
            seed=None,
            state=RunState.DONE if now_s >= self.ended_s else state,
            step=taken,
            max_steps=STEPS,
            pace=pace,
        )

    def _record(self, step: int) -> dict[str, object]:
        before = self.steps_s[step - 2] if step > 1 else self.began_s
        times = {"timestamp": at(self.steps_s[step - 1]), "step_time_s": self.steps_s[step - 1] - before}
        return {"step": step, "attempt": 1, **times}


@dataclass(frozen=True)
class Campaign:
    workers: int
    cores: float
    runs: list[Lived]

    @property
    def took_s(self) -> float:
        return max(run.ended_s for run in self.runs)

    def left(self, now_s: float) -> Remaining:
        rows = [run.row(now_s) for run in self.runs]
        found = remaining(rows, self.workers, crowding=on_cores(self.cores))
        assert found is not None
        return found


def recorded(number: int) -> Campaign:
    found = DATA["campaigns"][number]
    runs = [
        Lived(
            str(name),
            run["condition"],
            run["began"],
            run["ended"],
            np.interp(range(1, STEPS + 1), DATA["steps"], run["at"]).tolist(),
        )
        for name, run in enumerate(found["runs"])
    ]
    return Campaign(found["workers"], found["cores"], runs)


@pytest.mark.parametrize("number", range(3))
def test_sixty_steps_foretell_a_campaign_to_a_sixteenth(number: int) -> None:
    campaign = recorded(number)
    known_s = max(run.steps_s[59] for run in campaign.runs if run.began_s < 10.0)
    found = campaign.left(known_s)
    assert known_s < 0.1 * campaign.took_s
    assert known_s + found.p50_s == pytest.approx(campaign.took_s, rel=0.06)
    assert known_s + found.p90_s > campaign.took_s


def test_what_is_left_is_foretold_as_well_as_the_machine_is_steady() -> None:
    errors, kept = [], []
    for campaign in map(recorded, range(3)):
        for share in range(10, 90, 5):
            now_s = share / 100 * campaign.took_s
            found, left_s = campaign.left(now_s), campaign.took_s - now_s
            errors.append(abs(found.p50_s / left_s - 1))
            kept.append(found.p90_s >= left_s)
    assert statistics.median(errors) < 0.06
    assert statistics.fmean(kept) == pytest.approx(0.9, abs=0.06)


@pytest.mark.parametrize("number", range(3))
def test_the_end_of_a_campaign_is_foretold_to_a_twentieth_of_its_length(number: int) -> None:
    campaign = recorded(number)
    moments = [share / 100 * campaign.took_s for share in range(10, 95, 5)]
    ends = [now_s + campaign.left(now_s).p50_s for now_s in moments]
    errors = [abs(end / campaign.took_s - 1) for end in ends]
    assert statistics.median(errors) < 0.02
    assert sum(error <= 0.05 for error in errors) >= 0.75 * len(errors)


def slowing(run: int, now_s: float, factor: float) -> RunRow:
    """Return a run whose steps took a second until step 50, and `factor` seconds from then on."""
    times = np.cumsum([1.0] * 50 + [factor] * 750).tolist()
    return Lived(str(run), "a", 0.0, times[-1], times).row(now_s)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_the_pace_of_the_second_half_tells_of_the_rest(factor: float) -> None:
    row = slowing(0, 50 + 60 * factor, factor)
    found = remaining([row], 1)
    steady = remaining([slowing(0, 110.0, 1.0)], 1)
    assert found is not None
    assert steady is not None
    assert found.p50_s == pytest.approx(690 * factor, rel=0.02)
    assert found.p90_s / found.p50_s > steady.p90_s / steady.p50_s > 1.03


def test_a_run_that_has_just_begun_is_judged_by_one_that_knows_more() -> None:
    times = np.cumsum([3.0] * 40 + [1.0] * 760).tolist()
    runs = [Lived("old", "a", 0.0, 2000.0, times), Lived("new", "a", 700.0, 2000.0, [700 + t for t in times])]
    found = remaining([run.row(815.0) for run in runs], 2)
    assert found is not None
    assert found.p50_s == pytest.approx(800 - 38, rel=0.05)  # at its own pace it would take thrice as long
