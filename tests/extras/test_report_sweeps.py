"""What a report says of a sweep: which keys matter, and charts of each key and each pair."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from retrain.config.load import load_config
from retrain.config.sweep import Variant
from retrain.plan.build import plan_runs
from retrain.records.text import MISSING
from retrain.results.report.compare import MetricComparison, SideResult
from retrain.results.report.contents import contents
from retrain.results.report.gather import gather
from retrain.results.report.statistics import describe_sample
from retrain.results.report.sweeps import Sensitivity, Swept, sensitivities, table_of_keys
from tests.recorded import record_campaign

FILE = """
[training]
max_steps = 12
batch_size = 2
group_size = 4
max_tokens = 4
[campaign]
seeds = [0, 1]
[campaign.sweep]
training.lr = [1e-3, 1e-2]
algorithm.loss_mode = ["ppo", "cispo"]
training.temperature = { uniform = [0.5, 1.5], samples = 3 }
[[campaign.conditions]]
name = "a"
"""


def found_of(points: dict[str, dict[str, Any]], values: dict[str, float]) -> MetricComparison:
    sides = [
        SideResult(name, 1, 0, 0, 0, (9, 9), ((0, values[name]),), describe_sample((values[name],)))
        for name in points
    ]
    return MetricComparison("eval_reward", "at the end", True, tuple(sides), ())


def sensitivities_of(
    keys: dict[str, Any], points: list[dict[str, Any]], score: Any
) -> dict[str, Sensitivity]:
    named = {str(number): point for number, point in enumerate(points)}
    swept = Swept(keys, {name: Variant(1, {}, {}, point) for name, point in named.items()})
    found = sensitivities(found_of(named, {name: score(point) for name, point in named.items()}), swept)
    return {one.key: one for one in found}


def test_a_list_explains_what_its_values_means_differ_by() -> None:
    keys = {"a.x": [1, 2, 3], "a.y": ["p", "q"]}
    points = [{"a.x": x, "a.y": y} for x, y in product(*keys.values())]
    only_x = sensitivities_of(keys, points, lambda point: float(point["a.x"]))
    assert (only_x["a.x"].share, only_x["a.x"].best, only_x["a.x"].expected) == (1.0, 3, 3.0)
    assert only_x["a.y"].share == 0.0
    # sums of squares: 4 by x, 1.5 by y, 5.5 in all, over 2, 1 and 5 degrees of freedom
    both = sensitivities_of(keys, points, lambda point: point["a.x"] + (point["a.y"] == "q"))
    assert both["a.x"].share == pytest.approx(1 - (1.5 / 3) / (5.5 / 5))
    assert both["a.y"].share == pytest.approx(1 - (4 / 4) / (5.5 / 5))
    assert list(both) == ["a.x", "a.y"]  # the most important first


def test_a_range_explains_what_a_parabola_in_its_scale_does() -> None:
    keys = {"a.x": {"log_uniform": [1, 1e4], "samples": 5}}
    points = [{"a.x": 10.0**power} for power in range(5)]
    found = sensitivities_of(keys, points, lambda point: -((len(str(int(point["a.x"]))) - 3) ** 2))["a.x"]
    assert found.share == pytest.approx(1.0)
    assert found.best == 100.0  # the peak: three digits


def test_too_few_conditions_show_no_share() -> None:
    keys = {"a.x": [1, 2]}
    found = sensitivities_of(keys, [{"a.x": 1}, {"a.x": 2}], lambda point: float(point["a.x"]))
    assert found["a.x"].share is None
    assert table_of_keys(list(found.values()), "eval_reward")[1] == [("a.x", MISSING, "2", "2.00")]


def test_a_report_has_a_chart_of_each_key_and_of_each_pair(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(FILE)
    plan = plan_runs(load_config(file, [f"logging.log_dir={tmp_path / 'logs'}"]), "c.toml")
    files = record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=1.0)
    files.campaign_toml.write_text(FILE)
    shown = contents(gather(files.directory))
    assert [one.name for one in shown.sections["sweep"]] == [
        "sweep-training-lr",
        "sweep-training-temperature",
        "sweep-algorithm-loss-mode",
        "sweep-training-lr-training-temperature",
        "sweep-training-lr-algorithm-loss-mode",
        "sweep-training-temperature-algorithm-loss-mode",
    ]
    against = shown.sections["sweep"][0].spec["layer"][0]
    assert {row["k0"] for row in against["data"]["values"]} == {1e-3, 1e-2}
    assert len(against["data"]["values"]) == 24
    assert len(shown.tables["sweep"][1]) == 3


def test_a_campaign_without_a_sweep_has_no_such_section(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(FILE.partition("[campaign.sweep]")[0])
    plan = plan_runs(load_config(file, [f"logging.log_dir={tmp_path / 'logs'}"]), "c.toml")
    shown = contents(gather(record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=1.0).directory))
    assert ("sweep" in shown.tables, shown.sections["sweep"]) == (False, ())


@pytest.mark.parametrize("damage", ["{ samples = 3 }", f"{{ uniform = [1, 1{'0' * 400}], samples = 3 }}"])
def test_a_sweep_that_was_damaged_since_has_no_such_section(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(FILE)
    plan = plan_runs(load_config(file, [f"logging.log_dir={tmp_path / 'logs'}"]), "c.toml")
    files = record_campaign(plan, "c-20250131T120000Z-0a1b", closing_s=1.0)
    files.campaign_toml.write_text(FILE.replace("{ uniform = [0.5, 1.5], samples = 3 }", damage))
    assert contents(gather(files.directory)).sections["sweep"] == ()
