"""Whether a budget holds: workers are killed at random moments while a server meters every request.

    python -m benchmarks.budget [--kills 500] [--staleness 4] [--seed 0] [--json]

The bill is the server's own. Whenever the budget has stopped the campaign it is raised, and killing goes on.
With `--staleness`, rollouts are sampled ahead of training.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.suite import print_figures, script_parser
from tests.budget_kills import WORKERS, kill_with_budget
from tests.tinker_api.running import KEY


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["TINKER_API_KEY"] = KEY
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        found = kill_with_budget(
            Path(directory).resolve(), options.kills, options.seed, staleness=options.staleness
        )
    stops = found.stops
    row = {
        "kills": found.kills,
        "stops by the budget": len(stops),
        "workers": WORKERS,
        "most expensive steps over the budget, at worst": max(stop.steps_over for stop in stops),
        "bills above the budget": sum(stop.billed_usd > stop.budget_usd for stop in stops),
        "bills outside of what was counted": sum(
            not stop.known_usd * (1 - 1e-9) <= stop.billed_usd <= stop.at_most_usd * (1 + 1e-9)
            for stop in stops
        ),
        "bill over budget, median": statistics.median(stop.billed_usd / stop.budget_usd for stop in stops),
        "seconds": round(time.perf_counter() - started),
    }
    print_figures(row, as_json=options.json)


if __name__ == "__main__":
    main()
