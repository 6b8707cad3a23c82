"""Labels of conditions in charts: short, and as distinct as the names."""

from __future__ import annotations

import pytest

from retrain.records.text import short_labels
from retrain.results.report.charts import LONGEST, by_condition, final_chart
from retrain.results.report.compare import MetricComparison, SideResult
from retrain.results.report.statistics import describe_sample

LONG = "x" * LONGEST
SWEPT = [f"maxrl lr={lr} temperature={t}" for lr in ("0.01", "1e-4") for t in ("0.5", "0.96875")]


def test_swept_conditions_differ_in_their_labels() -> None:
    assert short_labels(SWEPT, LONGEST) == [
        "lr=0.01 temp…=0.5",
        "lr=0.01 temp…=0.96875",
        "lr=1e-4 temp…=0.5",
        "lr=1e-4 temp…=0.96875",
    ]


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        ([], []),
        (["grpo fast", "grpo slow"], ["grpo fast", "grpo slow"]),  # they fit
        ([f"{LONG} a", f"{LONG} b"], ["a", "b"]),
        ([f"{LONG}a", f"{LONG}b"], ["xxxxxxxxxx…xxxxxxxxxxa", "xxxxxxxxxx…xxxxxxxxxxb"]),
        ([LONG * 2, LONG * 2 + "x"], [LONG * 2, LONG * 2 + "x"]),  # cut, they would be equal
        ([LONG, f"{LONG} a"], [LONG, f"{LONG[:10]}…{LONG[:9]} a"]),  # without the shared word, one is empty
    ],
)
def test_labels_are_never_empty_or_equal(names: list[str], labels: list[str]) -> None:
    assert short_labels(names, LONGEST) == labels


def test_charts_show_labels_and_keep_names_in_their_data() -> None:
    sides = [SideResult(name, 1, 0, 0, 0, (9, 9), ((0, 1.0),), describe_sample((1.0,))) for name in SWEPT]
    drawn = final_chart(MetricComparison("eval_reward", "at the end", True, tuple(sides), ())).spec
    axis = drawn["encoding"]["y"]["axis"]["labelExpr"]
    assert axis.startswith('["lr=0.01 temp\\u2026=0.5", ')
    assert by_condition(SWEPT)["color"]["legend"]["labelExpr"] == axis
    assert {row["c"] for layer in drawn["layer"] for row in layer["data"]["values"]} == set(SWEPT)
    assert "labelExpr" not in by_condition(["a", "b"])["color"]["legend"]
