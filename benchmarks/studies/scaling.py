"""Learning-rate scaling when the batch grows eightfold in the middle of a run.

Noisy Rosenbrock: plain SGD along a curved valley. Numpy policy: the embedded backend learns to sort
two digits, with plain SGD and with Adam. Each rule continues the same small-batch run with batches
eight times as large, "small" with the small ones. Rules are compared at equal samples, in quarters of
the samples after the change; every gap is to "small" with the same seed.

    python -m benchmarks.studies.scaling [--full] [--json]
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # before numpy is imported

from benchmarks.studies.scaling_compare import Curve, Curves, Row, compare, cost, verdicts
from benchmarks.studies.scaling_policy import ADAM, SGD, sorting_curves
from benchmarks.studies.scaling_rosenbrock import rosenbrock_curves
from benchmarks.suite import script_parser

FIRST_SEED = 100  # the settings were chosen on seeds 0 to 3
PROBLEMS: dict[str, tuple[Callable[[int], dict[str, Curve]], str, float]] = {
    # curves of a seed, the rule that fits the optimizer, and the gap that counts as staying with "small"
    "rosenbrock": (rosenbrock_curves, "adascale", 0.1),
    "sort, sgd": (partial(sorting_curves, SGD), "adascale", 0.05),
    "sort, adam": (partial(sorting_curves, ADAM), "adamscale", 0.05),
}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--full", action="store_true", help="16 seeds instead of 4: ten minutes, not three; see scaling.md"
    )
    arguments = parser.parse_args()
    seeds = range(FIRST_SEED, FIRST_SEED + (16 if arguments.full else 4))
    rows, lines = [], []
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = {name: pool.map(curves_of, seeds) for name, (curves_of, _, _) in PROBLEMS.items()}
        for name, (_, rule, margin) in PROBLEMS.items():
            curves = by_rule(found[name])
            rows += compare(name, curves)
            lines += [*verdicts(name, curves, rule, margin), cost(name, curves, rule)]
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "verdicts": lines}))
    else:
        show(rows, len(seeds))
        print("\n".join(lines))


def by_rule(seeds: Iterable[dict[str, Curve]]) -> Curves:
    curves: dict[str, list[Curve]] = {}
    for found in seeds:
        for rule, curve in found.items():
            curves.setdefault(rule, []).append(curve)
    return curves


def show(rows: list[Row], seeds: int) -> None:
    """Print a line for each problem and rule."""
    print(f"{seeds} seeds, mean ± standard error; scores: digits of loss (-log10), held-out reward")
    columns = ("1st quarter", "2nd quarter", "3rd quarter", "last quarter", "last - small", "all - small")
    print(f"{'problem':<12}{'rule':<11}" + "".join(f"{c:>17}" for c in columns) + f"{'lr factor':>11}")
    for row in rows:
        cells = "".join(f"{estimate!s:>17}" for estimate in (*row.quarters, row.gap, row.whole_gap))
        print(f"{row.problem:<12}{row.rule:<11}{cells}{row.lr_factor:>11.2f}")


if __name__ == "__main__":
    main()
