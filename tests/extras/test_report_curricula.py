"""How well curricula predicted, as a report shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.results.report.contents import contents
from retrain.results.report.gather import gather
from tests.simulated import Row, Simulated, write_campaign


def predicted(step: int) -> Row:
    return {
        "curriculum_predicted": 0.5,
        "curriculum_seen": 0.5,
        "curriculum_prompts_20": 1,
        "curriculum_solved_20": 0.25 if step > 1 else 0.0,
        "curriculum_prompts_70": 3,
        "curriculum_solved_70": 0.85,
    }


def test_a_report_shows_predicted_beside_seen_success_rates(tmp_path: Path) -> None:
    runs = {("pool", 0): Simulated([0.5] * 2, more=predicted), ("shuffle", 0): Simulated([0.5] * 2)}
    shown = contents(gather(write_campaign(tmp_path, runs)))
    # 2 prompts seen at 0.125, outside of 0.2 to 0.3 by 0.075; 6 at 0.85, outside of 0.7 to 0.8 by 0.05
    [line] = shown.calibration
    assert line.startswith("pool: ")
    assert f"by {(2 * 0.075 + 6 * 0.05) / 8:.3f} (mean absolute error)" in line
    [chart] = shown.sections["curriculum"]
    points = chart.spec["layer"][-1]["data"]["values"]
    assert [(p["p"], p["n"]) for p in points] == [(0.25, 2), (0.75, 6)]
    assert [p["s"] for p in points] == pytest.approx([0.125, 0.85])


def test_a_report_without_predictions_has_no_such_section(tmp_path: Path) -> None:
    shown = contents(gather(write_campaign(tmp_path, {("shuffle", 0): Simulated([0.5] * 2)})))
    assert shown.calibration == shown.sections["curriculum"] == ()
