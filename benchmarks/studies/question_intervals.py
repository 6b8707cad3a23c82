"""How often does the 95 % interval of a difference, question by question, cover the true one?

Differences of two conditions are drawn with known deviations of seeds, of questions and of both; the true
difference is 0. Each cell is the share of `--draws` intervals that hold it.

    python -m benchmarks.studies.question_intervals [--draws 400] [--json]
"""

from __future__ import annotations

import itertools
import json
import statistics

import numpy as np

from benchmarks.suite import script_parser
from retrain.results.report.questions import summarize

SEEDS, QUESTIONS = (2, 3, 5), (20, 100, 500)
DEVIATIONS = ((0.0, 0.1, 0.3), (0.02, 0.1, 0.3), (0.05, 0.1, 0.3), (0.1, 0.1, 0.3), (0.1, 0.0, 0.1))


def covered(
    seeds: int, questions: int, deviations: tuple[float, float, float], draws: int
) -> tuple[float, float]:
    """Return the share of intervals that hold the true difference, and their median width."""
    rng, holds, widths = np.random.default_rng(0), [], []
    of_seeds, of_questions, of_both = deviations
    for _ in range(draws):
        gains = rng.normal(0, of_seeds, (seeds, 1)) + rng.normal(0, of_questions, (1, questions))
        found = summarize(gains + rng.normal(0, of_both, (seeds, questions)))
        assert found is not None
        holds.append(found.low <= 0 <= found.high)
        widths.append(found.high - found.low)
    return statistics.fmean(holds), statistics.median(widths)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for seeds, questions, deviations in itertools.product(SEEDS, QUESTIONS, DEVIATIONS):
        share, width = covered(seeds, questions, deviations, options.draws)
        rows.append({"seeds": seeds, "questions": questions, "deviations": deviations} | {"covered": share})
        if not options.json:
            print(f"{seeds} seeds, {questions:3} questions, sd {deviations}: {share:.1%}, width {width:.3f}")
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
