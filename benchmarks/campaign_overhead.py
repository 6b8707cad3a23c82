"""What orchestration costs: many short runs on few workers, against the ideal schedule.

    python -m benchmarks.campaign_overhead [--runs 40] [--workers 4] [--seconds 1.0] [--json]

Each run's one step waits for a fixed time (a rehearsed API's latency), so the ideal is the number of
waves times that; a worker's start-up is measured in the same run, by runs that wait for nothing.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from pathlib import Path

from benchmarks.suite import print_figures, script_parser
from retrain.campaign.run import run_campaign

TOML = """
[training]
batch_size = 1
group_size = 2
max_tokens = 4
save_every = 0
[data]
task = "copy"
eval_prompts = 1
[backend]
max_concurrent = 512
[backend.options]
api_latency_s = {latency}
[campaign]
seeds = {seeds}
max_steps = 1
parallel = true
max_workers = {workers}
"""
CALLS = 2  # a step and an evaluation sample; an update that carries no signal makes no call


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        waiting_s = campaign_seconds(options.runs, options.workers, options.seconds)
        empty_s = campaign_seconds(options.runs, options.workers, 0.0)
    waves = math.ceil(options.runs / options.workers)
    ideal_s = waves * options.seconds
    row = {
        "runs": options.runs,
        "workers": options.workers,
        "ideal_s": ideal_s,
        "campaign_s": waiting_s,
        "start_up_of_all_waves_s": empty_s,
        "over_ideal": waiting_s / ideal_s,
        "over_ideal_plus_start_up": waiting_s / (ideal_s + empty_s),
    }
    print_figures(row, as_json=options.json)


def campaign_seconds(runs: int, workers: int, seconds: float) -> float:
    """Time a campaign whose runs wait `seconds` in API calls."""
    path = Path("campaign.toml")
    path.write_text(TOML.format(latency=seconds / CALLS, seeds=list(range(runs)), workers=workers))
    started = time.perf_counter()
    outcome = run_campaign(path)
    elapsed = time.perf_counter() - started
    if outcome.exit_code != 0:
        raise SystemExit(f"the campaign failed: see {outcome.directory}")
    return elapsed


if __name__ == "__main__":
    main()
