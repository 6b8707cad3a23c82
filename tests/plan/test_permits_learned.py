"""What an estimate takes for the permits of a campaign whose number adapts to its API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrain.config.load import parse
from retrain.plan.build import plan_runs
from retrain.plan.estimate.history import learn
from retrain.plan.estimate.wall_time import WallTime, learned_for, wall_time
from retrain.plan.matrix import Plan
from retrain.records.layout import CampaignFiles
from tests.recorded import record_campaign

PERMITS = {  # of each row of a run
    "refused": [4, 5, 6, 7, 8, 2, 2, 3, 2, 2, 2, 1],
    "growing": [4, 4, 5, 6, 6, 7, 8, 8, 8, 8, 8, 8],
    "wide": [20, 21, 22, 23, 24, 16, 16, 16, 16, 16, 16, 16],
}
CALLING = {"sample_time_s": 1.0, "permit_wait_s": 0.0, "permit_held_s": 1.0}


def plan_of(logs: Path, backend: str = "numpy") -> Plan:
    options = {"api_latency_s": 1.0} if backend == "numpy" else {}
    raw = {
        "backend": {"backend": backend, "options": options, "max_concurrent": "auto"},
        "logging": {"log_dir": str(logs)},
        "campaign": {"seeds": list(range(8)), "max_steps": 12, "parallel": True, "max_workers": 8},
    }
    return plan_runs(parse(raw, "c.toml", try_plugins=False), "c.toml")


def estimated(logs: Path, permits: list[int], backend: str = "numpy") -> WallTime:
    measured = record_campaign(plan_of(logs), "c-20250131T120000Z-0a1b", closing_s=0.0, **CALLING)
    for run in plan_of(logs).runs:
        adapt(measured, run.run_id, permits)
    plan, history = plan_of(logs, backend), learn(logs)
    learned = learned_for(plan, history, cores=8.0)
    assert learned is not None
    return wall_time(plan, learned, cores=8.0)


def adapt(campaign: CampaignFiles, run_id: str, permits: list[int]) -> None:
    path = campaign.run(run_id).metrics
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    told = [json.dumps({**row, "permits": n}) for row, n in zip(rows, permits, strict=True)]
    path.write_text("\n".join(told) + "\n")


def test_where_the_api_bore_two_calls_eight_runs_take_four_times_as_long(tmp_path):
    found = estimated(tmp_path, PERMITS["refused"])
    assert found.p50_s == pytest.approx(8 * 12 / 2, rel=0.05)
    assert found.limited_by == "permits"
    assert any("2 permits are assumed" in note for note in found.notes)


def test_more_permits_than_the_api_bears_are_no_advice(tmp_path):
    assert "permits" not in [change.limit for change in estimated(tmp_path, PERMITS["refused"]).changes]


@pytest.mark.parametrize("permits", ["growing", "wide"])
def test_a_limit_that_was_not_met_or_holds_nobody_up_costs_nothing(tmp_path, permits):
    assert estimated(tmp_path, PERMITS[permits]).p50_s == pytest.approx(12.0, rel=0.02)


def test_a_limit_that_nobody_met_is_said_to_be_unknown(tmp_path):
    assert any("reached the API's limit" in note for note in estimated(tmp_path, PERMITS["growing"]).notes)


def test_another_backends_limit_is_not_this_ones(tmp_path):
    found = estimated(tmp_path, PERMITS["refused"], backend="local")
    assert found.permit_wait_fraction == 0.0
