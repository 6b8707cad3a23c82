"""Whether curricula expect what happens: success rates that they predicted, beside those that were seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.base.rollouts import Floats
from retrain.records.step_row import CurriculumSummary
from retrain.results.report import charts as vl
from retrain.results.report.charts import Chart, Spec
from retrain.results.report.sides import Side

BINS = 10  # of predicted rates, as rows have them
HALF = 0.5 / BINS
PREFIX = CurriculumSummary.PREFIX


@dataclass(frozen=True)
class Calibration:
    """A condition's prompts by the success rate that its curriculum predicted; arrays have shape (bins,)."""

    condition: str
    predicted: Floats  # middle of the bin
    seen: Floats  # success rate of its prompts
    prompts: Floats  # their number, above 0

    @property
    def error(self) -> float:
        """How far seen rates lie outside of their bins, on average over prompts."""
        outside = np.maximum(np.abs(self.seen - self.predicted) - HALF, 0.0)
        return float(np.average(outside, weights=self.prompts))


def calibrations(sides: Sequence[Side]) -> Iterator[Calibration]:
    """Iterate over the calibrations of conditions whose rows tell of predictions."""
    for side in sides:
        columns = [run.columns for run in side.runs]
        prompts, solved = np.zeros((2, BINS))
        for number in range(BINS):
            name = f"{number * 100 // BINS:02}"
            for rows in columns:
                counts = rows.metric(f"{PREFIX}prompts_{name}")
                prompts[number] += np.nansum(counts)
                solved[number] += np.nansum(counts * rows.metric(f"{PREFIX}solved_{name}"))
        filled = np.flatnonzero(prompts)
        if len(filled):
            middles = (filled + 0.5) / BINS
            yield Calibration(side.label, middles, solved[filled] / prompts[filled], prompts[filled])


def sentence(calibration: Calibration) -> str:
    """Return what a condition's calibration tells."""
    prompts, seen = calibration.prompts, float(np.average(calibration.seen, weights=calibration.prompts))
    return (
        f"{calibration.condition}: seen success rates differ from the tenths that were predicted by "
        f"{calibration.error:.3f} (mean absolute error); {seen:.2f} of the rollouts of {prompts.sum():,.0f} "
        "chosen prompts succeeded"
    )


def calibration_chart(found: Sequence[Calibration], labels: Sequence[str]) -> Chart:
    """Draw seen success rates over predicted ones; a circle's area is its number of prompts."""
    rows: list[Spec] = [
        {"c": each.condition, "p": vl.rounded(predicted), "s": vl.rounded(seen), "n": int(prompts)}
        for each in found
        for predicted, seen, prompts in zip(each.predicted, each.seen, each.prompts, strict=True)
    ]
    scale = {"domain": [0, 1]}
    x = vl.quantity("p", "predicted success rate", scale=scale)
    y = vl.quantity("s", "seen success rate", scale=scale)
    color = vl.by_condition(labels, {each.condition for each in found})["color"]
    hint = vl.hints(c="condition", p=("predicted", ".2f"), s=("seen", ".3f"), n=("prompts", "d"))
    circle = {"type": "circle", "opacity": 0.8}
    size = {"field": "n", "type": "quantitative", "scale": {"range": [20, 400]}, "legend": None}
    diagonal = {"type": "line", "color": vl.INK, "strokeDash": [4, 4], "strokeWidth": 1}
    return vl.chart(
        "curriculum-calibration",
        "Success rates that curricula predicted, and those seen",
        "Prompts by tenths of the predicted rate. Area: number of prompts. Dashed: as predicted.",
        layer=[
            vl.layer([{"p": 0, "s": 0}, {"p": 1, "s": 1}], diagonal, x=x, y=y),
            vl.layer(rows, {"type": "line", "strokeWidth": 1.2}, x=x, y=y, color=color),
            vl.layer(rows, circle, x=x, y=y, color=color, size=size, tooltip=hint),
        ],
    )
