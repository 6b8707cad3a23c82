"""Verdicts of real campaigns with `[decision]`: equal conditions, and conditions that differ.

    python -m benchmarks.decision_campaigns                    200 campaigns of either kind
    python -m benchmarks.decision_campaigns --campaigns 20     fewer

Campaigns of the numpy backend go through the whole runner, in this process. Equal conditions differ by a
thousandth in their learning rate, too little to matter but enough for other samples; the others by a factor
of three. Every fifth campaign is stopped after some of its runs, loses its manifest and is
resumed: it must come to the verdicts of its twin that was not stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from retrain.campaign import Observer
from retrain.campaign.run import reopen, start
from retrain.records.decision import Decision
from retrain.records.layout import CampaignFiles
from retrain.records.manifest import read_manifest

FILE = """
[training]
batch_size = 4
group_size = 8
max_tokens = 3
temperature = 1.0
lr = 1e-2
save_every = 0
[data]
task = "sort"
options = {{ length = 2, base = 3, held_out = 0.0 }}
[reward]
reward = "partial"
[logging]
log_dir = "{logs}"
samples_per_step = 0
[decision]
metric = "mean_reward"
max_seeds = 12
[campaign]
seeds = [{seed}]
max_steps = 12
launcher = "inline"
[[campaign.conditions]]
name = "reference"
[[campaign.conditions]]
name = "other"
training.lr = {lr}
"""
EVERY = 5  # campaign is stopped once
RATES = {"equal": 1.001e-2, "different": 3e-2}
FOUND = ("better", "worse")


class StopAfter(Observer):
    """Stops a campaign after some of its runs."""

    def __init__(self, runs: int) -> None:
        self._left = runs
        self.stop: Callable[[], None] = lambda: None

    def ended(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            self.stop()


def decision_of(directory: Path) -> Decision:
    manifest = read_manifest(CampaignFiles(directory).manifest)
    if manifest is None or manifest.decision is None:
        raise RuntimeError(f"{directory}: has no decision")
    return manifest.decision


def stopped(path: Path, runs: int) -> Decision:
    """Return the decision of a campaign that is stopped after so many runs, and resumed without manifest."""
    observer = StopAfter(runs)
    campaign = start(path, (), observer)
    observer.stop = campaign.stop
    directory = campaign.execute().directory
    CampaignFiles(directory).manifest.unlink()
    return decision_of(reopen(directory).execute().directory)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--campaigns", type=int, default=200, help="of either kind")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng, rows = random.Random(0), {}
    for kind, lr in RATES.items():
        verdicts: Counter[str] = Counter()
        seeds, others = 0, 0
        for number in range(options.campaigns):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "campaign.toml"
                path.write_text(FILE.format(logs=Path(folder) / "logs", seed=100 * number, lr=lr))
                found = decision_of(start(path).execute().directory)
                if number % EVERY == 0:
                    others += stopped(path, rng.randrange(1, found.runs)) != found
            (one,) = found.conditions
            verdicts[one.verdict] += 1
            seeds += one.seeds
        rows[kind] = {
            "campaigns": options.campaigns,
            "verdicts": dict(verdicts),
            "found_percent": 100 * sum(verdicts[name] for name in FOUND) / options.campaigns,
            "seeds_percent_of_12": 100 * seeds / options.campaigns / 12,
            "stopped": -(-options.campaigns // EVERY),
            "other_verdicts_when_stopped": others,
        }
    if options.json:
        print(json.dumps(rows))
        return
    for kind, row in rows.items():
        print(kind, *(f"{name}={value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
