"""Verdicts of real campaigns with `[decision]`: equal conditions, and conditions that differ.

    python -m benchmarks.studies.decision_campaigns                 200 of either kind (15 min of a core)
    python -m benchmarks.studies.decision_campaigns --campaigns 20  fewer
    python -m benchmarks.studies.decision_campaigns --record FILE   continues where it was ended before
    python -m benchmarks.studies.decision_campaigns --rungs         looks at rungs, where runs may stop
    python -m benchmarks.studies.decision_campaigns --equal 300     so many of equal conditions only
    python -m benchmarks.studies.decision_campaigns --once          to verdicts only, in a third of the time

Campaigns of the numpy backend go through the whole runner. Of equal conditions, one draws its weights and
samples from other seeds, and nothing else differs: which of the two is the reference changes no distribution.
The others have learning rates that differ by about a standard deviation of the paired difference. Each
campaign is run three times: to its verdict; again, in processes that are killed (SIGKILL) one to three times
at any point and resumed, half of them without their manifest; and without `[decision]`, with all seeds. The
second must come to the verdicts of the first, and the third must give the values that were looked at; its t
test tells what all seeds would have found.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scipy.stats import ttest_rel

from benchmarks.suite import script_parser
from retrain.backends import BackendSpec
from retrain.backends.numpy import connect
from retrain.backends.numpy.policy import NumpyBackend
from retrain.campaign import Observer
from retrain.campaign.run import reopen, start
from retrain.records.decision import Decision, read_looks, value_over
from retrain.records.layout import CampaignFiles, find_campaigns
from retrain.records.manifest import Manifest, read_manifest
from retrain.records.windows import Window

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
{decision}
[campaign]
seeds = {seeds}
max_steps = {steps}
launcher = "inline"
[[campaign.conditions]]
name = "reference"
[[campaign.conditions]]
name = "other"
{other}
"""
METRIC, SEEDS, ERROR = "mean_reward", 12, 0.05
DECISION = f'[decision]\nmetric = "{METRIC}"\nmax_seeds = {SEEDS}\nerror = {ERROR}'
AT_RUNGS = f'{DECISION}\nover = "whole"\nrungs = [2, 4, 8]'
KINDS = {
    "equal": 'backend.backend = "benchmarks.studies.decision_campaigns.reseeded"',
    "different": "training.lr = 2.2e-2",
}
FOUND = ("better", "worse")
OTHER_SEEDS = 10**6
LATEST_S = 0.06  # after a run's end, about as long as the next one takes
FORK = multiprocessing.get_context("fork")  # without importing everything again


@dataclass(frozen=True)
class Again:
    """What its twin and its runs without `[decision]` came to."""

    t_test: float  # p-value with all seeds
    effect: float  # mean over standard deviation of the paired difference, with all seeds
    kills: int  # of its twin
    same_decision: bool  # of its twin
    same_values: bool  # of the runs without `[decision]`


@dataclass(frozen=True)
class One:
    """What one campaign came to."""

    kind: str
    number: int
    verdict: str
    seeds: int
    again: Again | None  # None: it was run once


def reseeded(spec: BackendSpec) -> NumpyBackend:
    """Return the policy of a seed that no campaign uses."""
    return connect(replace(spec, seed=spec.seed + OTHER_SEEDS))


class KillAfter(Observer):
    """Kills its process some time after so many runs have ended."""

    def __init__(self, runs: int, later_s: float) -> None:
        self._left, self._later_s = runs, later_s

    def ended(self, *_: object) -> None:
        self._left -= 1
        if self._left == 0:
            timer = threading.Timer(self._later_s, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True  # a campaign that ends before is not killed
            timer.start()


def manifest_of(directory: Path) -> Manifest:
    manifest = read_manifest(CampaignFiles(directory).manifest)
    if manifest is None:
        raise RuntimeError(f"{directory}: has no manifest")
    return manifest


def decision_of(directory: Path) -> Decision:
    decision = manifest_of(directory).decision
    if decision is None:
        raise RuntimeError(f"{directory}: has no decision")
    return decision


def is_killed(work: Callable[[Observer], object], rng: random.Random, runs: int) -> bool:
    """Do some work in a process that is killed after some of the runs, if it has not ended before."""
    observer = KillAfter(rng.randint(1, runs), rng.uniform(0, LATEST_S))
    process = FORK.Process(target=work, args=(observer,))
    process.start()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"ended with {process.exitcode}")
    return process.exitcode == -signal.SIGKILL


def twin_of(path: Path, runs: int, rng: random.Random) -> tuple[int, Decision]:
    """Return how often a campaign was killed, and its decision."""
    kills = int(is_killed(lambda observer: start(path, (), observer).execute(), rng, runs))
    (directory,) = find_campaigns(path.parent / "logs")
    for _ in range(rng.randint(0, 2)):
        kills += is_killed(lambda observer: reopen(directory, observer).execute(), rng, max(1, runs // 3))
    if rng.random() < 0.5:
        CampaignFiles(directory).manifest.unlink(missing_ok=True)
    return kills, decision_of(reopen(directory).execute().directory)


def written(folder: Path, kind: str, decision: str, seeds: list[int], steps: int) -> Path:
    """Write the file of a campaign with logs of its own."""
    folder.mkdir()
    path = folder / "campaign.toml"
    tables = {"logs": folder / "logs", "decision": decision, "other": KINDS[kind]}
    path.write_text(FILE.format(seeds=seeds, steps=steps, **tables))
    return path


def campaign(kind: str, number: int, *, at_rungs: bool, is_once: bool) -> One:
    """Run a campaign; unless once, its twin and its runs without `[decision]` too."""
    table, steps = (AT_RUNGS, 8) if at_rungs else (DECISION, 4)
    rng, seeds = random.Random(f"{kind} {number}"), range(100 * number, 100 * number + SEEDS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        directory = start(written(folder / "decided", kind, table, [seeds[0]], steps)).execute().directory
        found = decision_of(directory)
        (one,) = found.conditions
        if is_once:
            return One(kind, number, one.verdict, one.seeds, None)
        kills, killed = twin_of(written(folder / "killed", kind, table, [seeds[0]], steps), found.runs, rng)
        all_seeds = start(written(folder / "all", kind, "", list(seeds), steps)).execute().directory
        values, looked = values_of(all_seeds), read_looks(CampaignFiles(directory).looks).values
        looked_again = {key: value_again(all_seeds, key) for key in looked} if at_rungs else values
        is_same = looked.items() <= looked_again.items()
    test = ttest_rel(*zip(*((values[f"other_s{s}"], values[f"reference_s{s}"]) for s in seeds), strict=True))
    effect = float(test.statistic) / SEEDS**0.5
    return One(
        kind,
        number,
        one.verdict,
        one.seeds,
        Again(float(test.pvalue), effect, kills, killed == found, is_same),
    )


def value_again(directory: Path, key: str) -> float | None:
    """Return what a look at a rung used, from a run that did not stop there."""
    run_id, _, rung = key.partition("@")
    window = Window(start=0.0, end=float(rung))
    return value_over(CampaignFiles(directory).run(run_id), {}, METRIC, window)[1]


def values_of(directory: Path) -> dict[str, float | None]:
    files = CampaignFiles(directory)
    runs = manifest_of(directory).runs
    return {run.run_id: value_over(files.run(run.run_id), run.result or {}, METRIC)[1] for run in runs}


def recorded(line: str) -> One:
    fields = json.loads(line)
    return One(**fields | {"again": fields["again"] and Again(**fields["again"])})


def summary(kind: str, ones: list[One]) -> dict[str, object]:
    """Return what campaigns of a kind came to; shares in percent."""

    def percent(shares: list[float]) -> float:
        return round(100 * sum(shares) / len(shares), 1)

    row: dict[str, object] = {
        "kind": kind,
        "campaigns": len(ones),
        "found": percent([one.verdict in FOUND for one in ones]),
        "seeds": percent([one.seeds / SEEDS for one in ones]),
    }
    if again := [one.again for one in ones if one.again]:
        row |= {
            "run_again": len(again),
            "t_test": percent([one.t_test < ERROR for one in again]),
            "effect": round(sum(one.effect for one in again) / len(again), 2),
            "kills": sum(one.kills for one in again),
            "killed_campaigns": sum(one.kills > 0 for one in again),
            "other_decisions_when_killed": sum(not one.same_decision for one in again),
            "other_values_without_decision": sum(not one.same_values for one in again),
        }
    return row


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--campaigns", type=int, default=200, help="of either kind")
    parser.add_argument("--equal", type=int, help="so many of equal conditions, and none of the others")
    parser.add_argument("--rungs", action="store_true", help="looks at rungs")
    parser.add_argument("--once", action="store_true", help="no twin, and no runs without [decision]")
    parser.add_argument("--record", type=Path, help="file of what each campaign came to")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    known: Path | None = options.record
    lines = known.read_text().splitlines() if known and known.exists() else []
    ones = {(one.kind, one.number): one for one in map(recorded, lines)}
    kinds = ["equal"] if options.equal else list(KINDS)
    for number in range(options.equal or options.campaigns):
        for kind in kinds:
            if (kind, number) not in ones:
                ones[kind, number] = campaign(kind, number, at_rungs=options.rungs, is_once=options.once)
                if known:
                    with known.open("a") as file:
                        file.write(json.dumps(asdict(ones[kind, number])) + "\n")
    rows = [summary(kind, [one for (name, _), one in ones.items() if name == kind]) for kind in kinds]
    if options.json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(*(f"{name}={value}" for name, value in row.items()))


if __name__ == "__main__":
    main()
