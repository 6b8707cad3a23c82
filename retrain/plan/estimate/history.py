"""Earlier campaigns in a log directory: their run times, and how accurate their forecasts were."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from retrain.base.clock import posix_s
from retrain.config.resolve import label_of
from retrain.plan.estimate.run_times import RunTimes, read_run_times
from retrain.plan.estimate.workload import Alive, Crowding
from retrain.records.files import read_json, readable, record_of, write_json
from retrain.records.layout import CampaignFiles, by_start, find_campaigns, is_single_run
from retrain.records.manifest import Expectation, Manifest, read_manifest
from retrain.records.metrics import median
from retrain.records.provenance import known_origin

CROWDING = "crowding.json"  # in a calibration's directory: slowdowns by concurrent runs, [runs, slowdown]
MOST_RUNS = 96  # read in total, the newest first: takes under a second
MOST_OF_A_CONDITION = 12  # more add little
MOST_SEEDS = 3  # of a condition per campaign: a recent smoke test must not hide an older pilot


@dataclass(frozen=True)
class Launches:
    """How long a campaign's workers took to start."""

    launcher: str
    mean_s: float  # from the campaign's start, or the previous run's end, to a worker's first record
    alive: int  # runs at a time while they started


@dataclass(frozen=True)
class History:
    """Times of earlier runs."""

    runs: tuple[RunTimes, ...]  # the newest campaign's first
    launches: tuple[Launches, ...]  # of campaigns whose runs each took one attempt
    expectations: tuple[Expectation, ...]  # predicted and actual times of finished campaigns
    crowding: Crowding | None = None  # slowdown by concurrent runs, if a calibration measured it

    def alone(self, crowding: Crowding) -> History:
        """Return runs and launches with their times converted to those of a run alone."""
        launches = tuple(replace(x, mean_s=x.mean_s / crowding.of(x.alive), alive=1) for x in self.launches)
        return replace(self, runs=tuple(run.alone(crowding) for run in self.runs), launches=launches)

    @property
    def startup_s(self) -> float | None:
        """Median seconds from a worker's first record to the first step."""
        return median(run.startup_s for run in self.runs)

    def launch_s(self, launcher: str) -> float | None:
        """Return the median seconds that a launcher takes from a free slot to a worker's first record."""
        return median(one.mean_s for one in self.launches if one.launcher == launcher)

    @property
    def closing_s(self) -> float | None:
        """Median seconds from the last step to the run's end."""
        return median(run.closing_s for run in self.runs)

    @property
    def failures_per_hour(self) -> float:
        hours = math.fsum(run.active_s for run in self.runs) / 3600
        return sum(run.failures for run in self.runs) / hours if hours else 0.0


def learn(log_dir: Path, conditions: Iterable[str] = ()) -> History:
    """Read the history of the campaigns and single runs in a directory, which may itself be one.

    Runs of `conditions` are read first; runs that cannot be read are left out.
    """
    return learn_from(find_campaigns(log_dir), conditions)


def learn_from(
    campaigns: Iterable[Path], conditions: Iterable[str] = (), most_of_a_condition: int = MOST_OF_A_CONDITION
) -> History:
    """Read the history of given campaigns, as `learn` does: the newest first, some runs of each condition."""
    newest_first = sorted(campaigns, key=by_start, reverse=True)
    manifests = {path: readable(read_manifest, CampaignFiles(path).manifest) for path in newest_first}
    candidates = _candidates(manifests, set(map(label_of, conditions)))
    timed = list(islice(_runs_with_times(candidates, most_of_a_condition), MOST_RUNS))
    used = {campaign: _alive_in(manifests[campaign]) for campaign in dict.fromkeys(c for c, _ in timed)}
    read = {path: found for path, found in manifests.items() if path in used and found is not None}
    return History(
        tuple(
            replace(_beside(run, used[campaign]), at_a_time=_at_a_time(manifests[campaign]))
            for campaign, run in timed
        ),
        tuple(_launches(read.items())),
        tuple(m.expected for m in read.values() if m.expected and m.expected.actual_s is not None),
        next(filter(None, (readable(_read_crowding, path.parent) for path in used)), None),
    )


def _candidates(
    manifests: Mapping[Path, Manifest | None], wanted: Collection[str]
) -> list[tuple[Path, Path]]:
    """Return campaigns and their runs: of the wanted conditions first, of each the newest first."""
    found = [(path, run) for path, known in manifests.items() for run in _run_directories(path, known)]
    return sorted(found, key=lambda entry: _label(entry[1]) not in wanted)


def _runs_with_times(
    candidates: Iterable[tuple[Path, Path]], most_of_a_condition: int
) -> Iterator[tuple[Path, RunTimes]]:
    """Iterate over campaigns and their readable runs, in this order, as many of a condition as help."""
    counts: Counter[object] = Counter()
    for campaign, directory in candidates:
        label, seeds = _label(directory), (campaign, _label(directory))
        is_enough = counts[label] >= most_of_a_condition or counts[seeds] >= MOST_SEEDS
        if not is_enough and (run := readable(read_run_times, directory)) is not None:
            counts.update((label, seeds))
            yield campaign, run


def write_crowding(calibration: Path, crowding: Crowding) -> None:
    """Keep the slowdown that a calibration measured beside its benchmarks, for later estimates from them."""
    write_json(calibration / CROWDING, asdict(crowding))


def _read_crowding(calibration: Path) -> Crowding | None:
    if (found := read_json(calibration / CROWDING)) is None:
        return None
    try:
        return record_of(Crowding, found)
    except ValueError:
        return None  # an estimate does not need it


def of_runs(runs: Sequence[RunTimes]) -> History:
    """Return the history of runs of one campaign."""
    alive = Alive(run.span for run in runs if run.span is not None)
    return History(tuple(_beside(run, alive) for run in runs), (), ())


def _label(run_directory: Path) -> str:
    return run_directory.name.rpartition("_s")[0]


def _run_directories(directory: Path, manifest: Manifest | None) -> Iterator[Path]:
    if is_single_run(directory):
        yield directory
        return
    files = CampaignFiles(directory)
    if manifest is not None:
        yield from (files.runs / Path(entry.run_id).name for entry in manifest.runs)
    elif files.runs.is_dir():
        yield from sorted(files.runs.iterdir())


def _alive_in(manifest: Manifest | None) -> Alive:
    entries = manifest.runs if manifest is not None else ()
    spans = [(posix_s(entry.started_at), posix_s(entry.ended_at)) for entry in entries]
    return Alive([(a, b) for a, b in spans if a is not None and b is not None], _at_a_time(manifest))


def _beside(run: RunTimes, alive: Alive) -> RunTimes:
    if run.span is None or not alive.is_known:
        return run
    return replace(run, alive=alive.between(*run.span))


def _at_a_time(manifest: Manifest | None) -> int:
    return min(manifest.workers, len(manifest.runs)) if manifest is not None else 0


def _launches(manifests: Iterable[tuple[Path, Manifest]]) -> Iterator[Launches]:
    for path, manifest in manifests:
        waits = list(_waits_s(manifest)) if all(run.attempts <= 1 for run in manifest.runs) else []
        if waits:
            alive = 1 if manifest.stagger_s else max(1, _at_a_time(manifest))
            yield Launches(known_origin(CampaignFiles(path))[0].launcher, statistics.fmean(waits), alive)


def _waits_s(manifest: Manifest) -> Iterator[float]:
    """Iterate over the seconds from a free slot to a worker's first record, run by run.

    Staggered launches also wait for each other, so only the first one counts.
    """
    starts = sorted(start for run in manifest.runs if (start := posix_s(run.started_at)) is not None)
    ends = sorted(end for run in manifest.runs if (end := posix_s(run.ended_at)) is not None)
    began = posix_s(manifest.started_at)
    places = _at_a_time(manifest) or len(starts)
    free = [began] * places + list(ends)
    pairs = list(zip(starts, free, strict=False))
    for start, since in pairs[: 1 if manifest.stagger_s else None]:
        if since is not None:
            yield max(0.0, start - since)
