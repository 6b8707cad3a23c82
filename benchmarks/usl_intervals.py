"""How often the 95 % intervals of `fit_usl` hold the truth, and how often it claims a false optimum.

    python -m benchmarks.usl_intervals                500 data sets per design (150 s)
    python -m benchmarks.usl_intervals --sets 100     fewer

A design is a list of concurrencies, a curve and a relative noise. Each throughput is the curve's times a
log-normal factor. A false optimum is a finite p* in an identified fit where the curve has none.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.suite import script_parser
from retrain.control.rules.usl import fit_usl

Array = NDArray[np.floating]

CONCURRENCIES: dict[str, Array] = {
    "1-16, 5 points": 2.0 ** np.arange(5),
    "1-64, 7 points": 2.0 ** np.arange(7),
    "8-512, 7 points": 2.0 ** np.arange(3, 10),
    "1-32 twice, 12 points": np.tile(2.0 ** np.arange(6), 2),
    "1-32, 32 points": np.arange(1.0, 33.0),
}
CURVES = ((0.05, 0.001), (0.02, 0.0002), (0.1, 0.0))  # sigma, kappa
NOISES = (0.02, 0.05, 0.10)
LAMBDA = 100.0


@dataclass(frozen=True)
class Row:
    """One design; shares in percent of the data sets."""

    design: str
    sigma: float
    kappa: float
    noise: float
    sigma_held: float
    kappa_held: float
    lambda_held: float
    claimed: float  # a finite p* in an identified fit

    @property
    def false_optima(self) -> float:
        return 0.0 if self.kappa else self.claimed


def coverage(design: str, sigma: float, kappa: float, noise: float, sets: int, method: str) -> Row:
    p = CONCURRENCIES[design]
    rng = np.random.default_rng([len(p), int(1e6 * sigma), int(1e6 * kappa), int(1e3 * noise)])
    clean = LAMBDA * p / (1 + sigma * (p - 1) + kappa * p * (p - 1))
    truth = {"sigma": sigma, "kappa": kappa, "lambda": LAMBDA}
    held, claimed = dict.fromkeys(truth, 0), 0
    for factors in np.exp(rng.normal(0.0, noise, (sets, p.size))):
        fit = fit_usl(p, clean * factors, method)  # type: ignore[arg-type]
        for name, (low, high) in fit.intervals.items():
            held[name] += low <= truth[name] <= high
        claimed += fit.identified and math.isfinite(fit.p_star)
    shares = [100.0 * count / sets for count in (*held.values(), claimed)]
    return Row(design, sigma, kappa, noise, *shares)


def rows(sets: int, method: str) -> Iterator[Row]:
    for design, (sigma, kappa), noise in itertools.product(CONCURRENCIES, CURVES, NOISES):
        yield coverage(design, sigma, kappa, noise, sets, method)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--sets", type=int, default=500)
    parser.add_argument("--method", choices=("nls", "online"), default="nls")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = list(rows(asked.sets, asked.method))
    if asked.json:
        print(json.dumps([asdict(row) | {"false_optima": row.false_optima} for row in found]))
        return
    print("concurrencies           sigma   kappa noise   held, %: sigma  kappa lambda   optima claimed, %")
    for row in found:
        print(
            f"{row.design:22s} {row.sigma:6g} {row.kappa:7g} {row.noise:5g} {row.sigma_held:16.1f} "
            f"{row.kappa_held:6.1f} {row.lambda_held:6.1f} {row.claimed:12.1f}{'' if row.kappa else ' false'}"
        )


if __name__ == "__main__":
    main()
