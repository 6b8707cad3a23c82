"""Errors, power and seeds of the sequential comparison, beside one t test with all seeds.

    python -m benchmarks.evidence                     2,000 campaigns per row (1 min)
    python -m benchmarks.evidence --campaigns 200     fewer

A campaign adds pairs of seeds, at most 12, and looks after each. Differences are given in standard deviations
of the paired difference. `family` has four conditions against a reference: the share of campaigns with any
false verdict.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import ttest_1samp

from benchmarks.suite import script_parser
from retrain import SequentialComparison
from retrain.control.rules.sequential import FEWEST

SEEDS, FAMILY = 12, 4  # most seeds; conditions that are compared with one reference
FOUND = ("better", "worse")
DIFFERENCES = (0.0, 0.5, 1.0, 2.0)
FloatArray = NDArray[np.float64]
Draw = Callable[[np.random.Generator, tuple[int, ...]], FloatArray]


def collapsed(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    return np.where(rng.random(shape) < 0.1, 0.0, rng.normal(0.8, 0.03, shape))


# The metric of one run: how it is drawn, and its variance.
METRICS: dict[str, tuple[Draw, float]] = {
    "normal": (lambda rng, shape: rng.normal(size=shape), 1.0),
    "bimodal 0.3/0.9": (lambda rng, shape: rng.choice([0.3, 0.9], shape), 0.09),
    "lognormal": (lambda rng, shape: rng.lognormal(size=shape), (np.e - 1) * np.e),
    "binomial 97 of 100": (lambda rng, shape: rng.binomial(100, 0.97, shape) / 100, 0.97 * 0.03 / 100),
    "one in ten collapses": (collapsed, 0.1 * 0.9 * 0.64 + 0.9 * 0.0009),
}


@dataclass(frozen=True)
class Row:
    """One metric and difference; shares in percent."""

    metric: str
    difference: float  # standard deviations of the paired difference
    found: float  # "better" or "worse"
    t_test: float  # found by a t test with all seeds
    seeds: float  # mean, of the most
    held: float  # intervals at the end that hold the difference


def end_of(comparison: SequentialComparison, a: FloatArray, b: FloatArray) -> tuple[int, str]:
    """Return after how many seeds looks at each end, and with which verdict."""
    looks = (comparison.look(a[:seeds], b[:seeds]) for seeds in range(FEWEST, SEEDS + 1))
    return next((look.seeds, look.verdict) for look in looks if look.verdict != "continue")


def row_of(name: str, difference: float, rng: np.random.Generator, campaigns: int) -> Row:
    draw, variance = METRICS[name]
    gap, comparison = difference * sqrt(2 * variance), SequentialComparison(SEEDS)
    d = draw(rng, (campaigns, SEEDS)) - draw(rng, (campaigns, SEEDS)) + gap
    ends = [end_of(comparison, one, np.zeros(SEEDS)) for one in d]
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):  # of equal differences
        fixed = ttest_1samp(d, 0, axis=1).pvalue < 0.05
    some = list(zip(d, ends, strict=True))[: max(50, campaigns // 10)]  # intervals take longer
    intervals = [comparison.look(one[:k], np.zeros(k)).interval for one, (k, _) in some]
    shares = (
        [verdict in FOUND for _, verdict in ends],
        fixed,
        [k / SEEDS for k, _ in ends],
        [low <= gap <= high for low, high in intervals],
    )
    return Row(name, difference, *(100 * float(np.mean(share)) for share in shares))


def false_in_family(rng: np.random.Generator, campaigns: int) -> float:
    """Return the share in percent of campaigns of equal conditions with any difference found."""
    comparison = SequentialComparison(SEEDS, comparisons=FAMILY)
    runs = rng.normal(size=(campaigns, FAMILY + 1, SEEDS))
    found = [any(end_of(comparison, one, reference)[1] in FOUND for one in rest) for reference, *rest in runs]
    return 100 * float(np.mean(found))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--campaigns", type=int, default=2000, help="per row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    rows = [row_of(name, gap, rng, options.campaigns) for name in METRICS for gap in DIFFERENCES]
    family = false_in_family(rng, options.campaigns)
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "family": family}))
        return
    columns = ("metric", "difference", "found, %", "t test, %", "seeds, % of 12", "interval holds it, %")
    table = Table(*columns, box=None)
    for row in rows:
        shares = (row.found, row.t_test, row.seeds, row.held)
        table.add_row(row.metric, f"{row.difference:g}", *(f"{share:.1f}" for share in shares))
    table.add_row(f"family of {FAMILY}, normal", "0", f"{family:.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
