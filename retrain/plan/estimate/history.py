"""Earlier campaigns below a log directory: their runs' times, and how well they were estimated."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from retrain.clock import posix_s
from retrain.config.labels import label_of
from retrain.errors import RecordsError
from retrain.plan.crowding import Alive, Crowding
from retrain.plan.estimate.measured import MeasuredRun, measure_run
from retrain.plan.provenance import known_origin
from retrain.records.layout import CampaignFiles, find_campaigns, is_single_run
from retrain.records.manifest import Expectation, Manifest, read_manifest

MOST_RUNS = 96  # read over all campaigns, the newest first: under a second
MOST_OF_A_CONDITION = 12  # more tell little more
MOST_SEEDS = 3  # of a condition in one campaign: the newest may be a smoke test, and hide the pilot before it


@dataclass(frozen=True)
class Launches:
    """How long a campaign's workers took to start once there was a place for them."""

    launcher: str
    mean_s: float  # from the campaign's start, or the end of the run before, to a worker's first record
    alive: int  # runs at a time while they started


@dataclass(frozen=True)
class History:
    """What earlier runs took."""

    runs: tuple[MeasuredRun, ...]  # the newest campaign's first
    campaigns: int  # that they belong to
    launches: tuple[Launches, ...]  # of campaigns whose runs took one attempt each
    expectations: tuple[Expectation, ...]  # of finished campaigns: predicted and actual

    def alone(self, crowding: Crowding) -> History:
        """Return runs and launches as they would be without any beside them."""
        launches = tuple(replace(x, mean_s=x.mean_s / crowding.of(x.alive), alive=1) for x in self.launches)
        return replace(self, runs=tuple(run.alone(crowding) for run in self.runs), launches=launches)

    @property
    def startup_s(self) -> float | None:
        """Median seconds from a worker's first record to the first step."""
        known = [run.startup_s for run in self.runs if run.startup_s is not None]
        return statistics.median(known) if known else None

    def launch_s(self, launcher: str) -> float | None:
        """Return the median seconds that a launcher takes from a free place to a worker's first record."""
        known = [launches.mean_s for launches in self.launches if launches.launcher == launcher]
        return statistics.median(known) if known else None

    @property
    def closing_s(self) -> float | None:
        """Median seconds from the last step to the run's end."""
        known = [run.closing_s for run in self.runs if run.closing_s is not None]
        return statistics.median(known) if known else None

    @property
    def failures_per_hour(self) -> float:
        """Failures of the surroundings per hour of taking steps."""
        hours = math.fsum(run.active_s for run in self.runs) / 3600
        return sum(run.failures for run in self.runs) / hours if hours else 0.0


def learn(log_dir: Path, conditions: Iterable[str] = ()) -> History:
    """Learn from the campaigns and single runs below a directory, or from the one that it is.

    Args:
        log_dir: where they lie.
        conditions: names of those of most interest: runs of these are read first.

    Raises:
        RecordsError: there is no such directory. Runs that cannot be read are left out.
    """
    return learn_from(find_campaigns(log_dir), conditions)


def learn_from(
    campaigns: Iterable[Path], conditions: Iterable[str] = (), most_of_a_condition: int = MOST_OF_A_CONDITION
) -> History:
    """Learn from given campaigns, as `learn` does: the newest first, some runs of each condition."""
    wanted = set(map(label_of, conditions))
    found = [(path, _manifest(path)) for path in sorted(campaigns, key=_began, reverse=True)]
    manifests = {path: manifest for path, manifest in found if manifest is not None}
    candidates = [(path, run) for path, manifest in found for run in _run_directories(path, manifest)]
    candidates.sort(key=lambda entry: _label(entry[1]) not in wanted)  # stable: the newest first
    runs: list[MeasuredRun] = []
    counts: Counter[object] = Counter()
    used: dict[Path, Alive] = {}
    for campaign, directory in candidates:
        label, seeds = _label(directory), (campaign, _label(directory))
        if len(runs) >= MOST_RUNS or counts[label] >= most_of_a_condition or counts[seeds] >= MOST_SEEDS:
            continue
        run = _measured(directory)
        if run is not None:
            manifest = manifests.get(campaign)
            if campaign not in used:
                used[campaign] = _alive_in(manifest)
            runs.append(replace(_beside(run, used[campaign]), at_a_time=_at_a_time(manifest)))
            counts.update((label, seeds))
    told = [manifest for path, manifest in manifests.items() if path in used]
    return History(
        tuple(runs),
        len(used),
        tuple(_launches({path: manifests[path] for path in used if path in manifests})),
        tuple(_kept_expectations(told)),
    )


def of_runs(directories: Iterable[Path]) -> History:
    """Learn from given runs' directories, all of one campaign; those without two whole steps are left out.

    Raises:
        RecordsError: one cannot be read.
    """
    runs = tuple(run for directory in directories if (run := measure_run(directory)) is not None)
    alive = Alive(run.span for run in runs if run.span is not None)
    return History(tuple(_beside(run, alive) for run in runs), 1 if runs else 0, (), ())


def _began(directory: Path) -> str:
    """Return the UTC time in a campaign's name, which orders campaigns of different names."""
    return directory.name[-21:]


def _label(run_directory: Path) -> str:
    return run_directory.name.rpartition("_s")[0]


def _manifest(directory: Path) -> Manifest | None:
    try:
        return read_manifest(CampaignFiles(directory).manifest)
    except RecordsError:
        return None


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


def _beside(run: MeasuredRun, alive: Alive) -> MeasuredRun:
    if run.span is None or not alive.is_known:
        return run
    return replace(run, alive=alive.between(*run.span))


def _at_a_time(manifest: Manifest | None) -> int:
    return min(manifest.workers, len(manifest.runs)) if manifest is not None else 0


def _measured(directory: Path) -> MeasuredRun | None:
    try:
        return measure_run(directory)
    except RecordsError:
        return None


def _kept_expectations(manifests: Iterable[Manifest]) -> Iterator[Expectation]:
    """Return what was expected of campaigns that were then seen to end."""
    for manifest in manifests:
        if manifest.expected and manifest.expected.actual_s is not None:
            yield manifest.expected


def _launches(manifests: Mapping[Path, Manifest]) -> Iterator[Launches]:
    for path, manifest in manifests.items():
        waits = list(_waits_s(manifest)) if all(run.attempts <= 1 for run in manifest.runs) else []
        if waits:
            alive = 1 if manifest.stagger_s else max(1, _at_a_time(manifest))
            yield Launches(known_origin(CampaignFiles(path))[0].launcher, statistics.fmean(waits), alive)


def _waits_s(manifest: Manifest) -> Iterator[float]:
    """Iterate over the seconds from when a place was free to a worker's first record, run by run.

    Staggered launches wait for each other as well, so only the first of them tells.
    """
    starts = sorted(start for run in manifest.runs if (start := posix_s(run.started_at)) is not None)
    ends = sorted(end for run in manifest.runs if (end := posix_s(run.ended_at)) is not None)
    began = posix_s(manifest.started_at)
    places = _at_a_time(manifest) or len(starts)
    free = [began] * places + list(ends)
    pairs = list(zip(starts, free, strict=False))
    yield from (
        max(0.0, start - since)
        for start, since in pairs[: 1 if manifest.stagger_s else None]
        if since is not None
    )
