"""Errors, power and seeds of the sequential comparison, beside one t test with all seeds.

    python -m benchmarks.evidence                     2,000 campaigns per row (4 min)
    python -m benchmarks.evidence --campaigns 200     fewer

A campaign adds pairs of seeds, at most 12, and looks after each. Differences are given in standard deviations
of the paired difference. `family` has four conditions against a reference: the share of campaigns with any
false verdict.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import ttest_1samp

from retrain import SequentialComparison

SEEDS = 12
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


def decided(comparison: SequentialComparison, d: FloatArray) -> tuple[str, int]:
    """Return the verdict that ends the comparison of these differences, and the seeds it took."""
    for k in range(2, len(d) + 1):
        look = comparison.look(d[:k], np.zeros(k))
        if look.verdict != "continue":
            break
    return look.verdict, look.seeds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--campaigns", type=int, default=2000, help="per row")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, n = np.random.default_rng(options.seed), options.campaigns
    table = Table(
        "metric", "difference", "found, %", "t test, %", "seeds, % of 12", "interval holds it, %", box=None
    )
    for name, (draw, variance) in METRICS.items():
        for difference in DIFFERENCES:
            gap = difference * sqrt(2 * variance)
            d = draw(rng, (n, SEEDS)) - draw(rng, (n, SEEDS)) + gap
            comparison = SequentialComparison(SEEDS)
            ends = [decided(comparison, one) for one in d]
            found = np.mean([verdict in ("better", "worse") for verdict, _ in ends])
            with np.errstate(all="ignore"):
                fixed = np.mean(ttest_1samp(d, 0, axis=1).pvalue < 0.05)
            some = list(zip(d, ends, strict=True))[: max(50, n // 10)]  # intervals take longer
            held = [
                low <= gap <= high
                for low, high in (comparison.look(one[:k], np.zeros(k)).interval for one, (_, k) in some)
            ]
            seeds = np.mean([k for _, k in ends]) / SEEDS
            cells = (100 * found, 100 * fixed, 100 * seeds, 100 * np.mean(held))
            table.add_row(name, f"{difference:g}", *(f"{cell:.1f}" for cell in cells))
    family = 0
    comparison = SequentialComparison(SEEDS, comparisons=4)
    for _ in range(n):
        runs = rng.normal(size=(5, SEEDS))
        family += any(decided(comparison, one - runs[0])[0] in ("better", "worse") for one in runs[1:])
    table.add_row("family of 4, normal", "0", f"{100 * family / n:.1f}", "", "", "")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
