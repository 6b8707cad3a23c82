"""How often back pressure reports an optimum, how true it is, and in which regime steps above the limit are.

    python -m benchmarks.studies.backpressure_optimum            6 seeds x 300 steps per world (10 s)
    python -m benchmarks.studies.backpressure_optimum --seeds 2  fewer

Worlds follow the Universal Scalability Law, in groups of 8, batches of 1 to 64 from 8 on, with log-normal
noise. An optimum is near if it is within a factor of 3 of the true one; without a true one none is. A step is
above the limit if its concurrency exceeds throttle_margin (0.85) times the optimum reported after it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

import numpy as np

from benchmarks.suite import script_parser
from retrain.control.rules.backpressure import BackPressure, StepObservation

STEPS, GROUP, FIRST, LARGEST = 300, 8, 8, 64
MARGIN = 0.85
SIGMAS = (0.05, 0.3)
KAPPAS = (0.0, 3e-6, 1e-5, 1e-4, 1e-3, 1e-2)


@dataclass(frozen=True)
class Row:
    """One world; percent of decisions unless noted."""

    sigma: float
    kappa: float
    p_star: float | None  # the true one
    reported: float
    near: float | None  # of those with an optimum
    at_one: float  # an optimum of a single rollout is reported
    above: float  # the limit
    above_and_optimal: float
    regret: float  # percent of throughput


def simulate(sigma: float, kappa: float, noise: float, seeds: int) -> Row:
    def throughput(p: float) -> float:
        return p / (1.0 + sigma * (p - 1.0) + kappa * p * (p - 1.0))

    truth = math.sqrt((1.0 - sigma) / kappa) if kappa else math.inf
    highest = max(throughput(GROUP * batch) for batch in range(1, LARGEST + 1))
    reported: list[float] = []
    above: list[str] = []
    regret = 0.0
    for seed in range(seeds):
        controller = BackPressure(FIRST, GROUP, max_batch_size=LARGEST, throttle_margin=MARGIN)
        rng = np.random.default_rng([seed, round(1e6 * sigma), round(1e9 * kappa)])
        for factor in np.exp(rng.normal(0.0, noise, STEPS)):
            batch = controller.batch_size
            p = batch * GROUP
            decision = controller.observe(StepObservation(batch, GROUP, p, p / (throughput(p) * factor)))
            regret += 1.0 - throughput(p) / highest
            if decision.p_star is None or math.isinf(decision.p_star):
                continue
            reported.append(decision.p_star)
            if p > MARGIN * decision.p_star:
                above.append(decision.regime)
    percent = 100.0 / (seeds * STEPS)
    near = sum(truth / 3.0 <= p_star <= 3.0 * truth for p_star in reported)
    return Row(
        sigma,
        kappa,
        p_star=truth if kappa else None,
        reported=percent * len(reported),
        near=100.0 * near / len(reported) if reported else None,
        at_one=percent * sum(p_star <= 1.0 for p_star in reported),
        above=percent * len(above),
        above_and_optimal=percent * above.count("optimal"),
        regret=percent * regret,
    )


def print_table(rows: list[Row]) -> None:
    names = ("sigma", "kappa", "true p*", "reported", "near", "p* = 1", "above", "as optimal", "regret")
    print("".join(f"{name:>11s}" for name in names))
    for row in rows:
        cells = ["-" if value is None else f"{value:.3g}" for value in asdict(row).values()]
        print("".join(f"{cell:>11s}" for cell in cells))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=6, help="runs per world")
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviation of log throughput")
    parser.add_argument("--json", action="store_true", help="the same rows as JSON")
    arguments = parser.parse_args()
    worlds = [(sigma, kappa) for sigma in SIGMAS for kappa in KAPPAS]
    rows = [simulate(sigma, kappa, arguments.noise, arguments.seeds) for sigma, kappa in worlds]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print_table(rows)


if __name__ == "__main__":
    main()
