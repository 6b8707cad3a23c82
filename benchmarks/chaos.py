"""What killing costs: real SIGKILLs at random moments, simulated ones at every file operation, power losses.

    python -m benchmarks.chaos [--kills 60] [--episodes 60] [--plans 2000] [--losses 500] [--full] [--json]

`--full`: 2,000 real kills, 1,000 within episodes, 10,000 simulated plans, 5,000 power losses (40 minutes).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.suite import script_parser
from tests.chaos import Chaos
from tests.crash_run import Verdict, power_losses, random_kills
from tests.episode_kills import TABLES, kill_within_episodes


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--episodes", type=int, default=60, help="kills in the middle of episodes, in all")
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--losses", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.full:
        options.kills, options.episodes = 2000, 1000
        options.plans, options.losses = 10_000, 5000
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory).resolve()
        found = {
            "simulated kills": timed(
                lambda: simulated(random_kills(root / "plans", options.plans, options.seed))
            ),
            "power losses": timed(
                lambda: simulated(power_losses(root / "losses", options.losses, options.seed))
            ),
            "real kills": timed(lambda: real(root / "real", options.kills, options.seed)),
            **{
                f"kills within episodes, {way}": timed(partial(episodes, root / way, options, way))
                for way in TABLES
            },
        }
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for title, row in found.items():
        print(title)
        for name, value in row.items():
            print(f"  {name:<24}{value:>12}")


def timed(measure: Callable[[], dict[str, object]]) -> dict[str, object]:
    started = time.perf_counter()
    row = measure()
    return {**row, "seconds": round(time.perf_counter() - started, 1)}


def simulated(verdict: Verdict) -> dict[str, object]:
    return {**asdict(verdict), "problems": len(verdict.problems)}


def real(directory: Path, kills: int, seed: int) -> dict[str, object]:
    if kills == 0:
        return {}
    directory.mkdir()
    return asdict(Chaos(directory, seed).disturb(kills))


def episodes(directory: Path, options: argparse.Namespace, way: str) -> dict[str, object]:
    found = kill_within_episodes(directory, math.ceil(options.episodes / len(TABLES)), options.seed, way)
    steps = f"{min(found.resumed_from)} to {max(found.resumed_from)}" if found.resumed_from else "none"
    facts = {"kills": found.kills, "runs": found.runs, "resumed from steps": steps}
    return {**facts, "problems": len(found.problems)}


if __name__ == "__main__":
    main()
