"""What one run left: where it is, its output and whether that is still written, and its samples."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from retrain.base.errors import ConfigError, RecordsError
from retrain.base.locks import is_held
from retrain.base.redaction import redacted
from retrain.config.resolve import label_of
from retrain.records.files import opened
from retrain.records.layout import (
    CampaignFiles,
    RunFiles,
    instead_of,
    is_campaign,
    is_single_run,
    refuse_links,
)
from retrain.records.lines import read_end
from retrain.records.provenance import recorded_entry
from retrain.records.samples import KeptSample, samples_of
from retrain.records.text import first_of, plain, plain_lines

POLL_S = 0.2
_LONGEST_LINE = 2000
SHOWN_RUNS = 10
Which = Literal["", "best", "worst", "ties"]


def find_run(directory: Path, run_id: str = "") -> RunFiles:
    """Find a run, given by its directory or by its campaign's and its id or CONDITION_sSEED.

    Raises:
        ConfigError: none of a campaign's runs is named, or there is no such run; lists the existing ones.
    """
    campaign = CampaignFiles(directory)
    if not is_campaign(directory):
        if run_id or not is_single_run(directory):
            raise ConfigError(f"{directory}: {instead_of(directory)}")
        return RunFiles(directory)
    runs = _runs(campaign)
    if not run_id:
        raise ConfigError(f"{directory}: is a campaign; name one of its runs: {_listed(campaign, runs)}")
    condition, _, seed = run_id.rpartition("_s")
    for name in (run_id, f"{label_of(condition)}_s{seed}"):
        if name in runs and (files := campaign.run(name)).run_toml.is_file():
            refuse_links(files.directory)
            return files
    from retrain.base.registry import hint  # not at the top: only an error needs it

    fix = hint(run_id, runs if len(runs) > SHOWN_RUNS else (), f"it has {_listed(campaign, runs)}")
    raise ConfigError(f"{directory}: has no run {run_id!r}; {fix}")


def _listed(campaign: CampaignFiles, runs: Sequence[str]) -> str:
    names = [recorded_entry(campaign.run(run_id)).name for run_id in runs[:SHOWN_RUNS]]
    return plain(first_of([*names, *runs[SHOWN_RUNS:]], SHOWN_RUNS), 1000)


def _runs(campaign: CampaignFiles) -> list[str]:
    refuse_links(campaign.runs)
    return sorted(path.name for path in campaign.runs.iterdir()) if campaign.runs.is_dir() else []


@dataclass(frozen=True)
class Log:
    """A file of output, and the locks of the processes that write it."""

    path: Path
    lock: Path  # of the process that writes it
    starter: Path | None = None  # lock of the orchestrator, which may start another such process
    end: Path | None = None  # a file that exists once no further process will be started
    beside: tuple[Path, ...] = ()  # the cluster's output for the run's tasks

    def is_over(self) -> bool:
        """Whether no process that could write to it is alive."""
        if is_held(self.lock):
            return False
        is_finished = self.end is not None and self.end.exists()
        return is_finished or self.starter is None or not is_held(self.starter)


def find_log(directory: Path, run_id: str = "") -> Log:
    """Find the output of a run, given by its directory or by a campaign's and its id; else a campaign's own.

    Of a single run in the background it is the orchestrator's, with the run's own beside it.

    Raises:
        ConfigError: of `find_run`; or no run is named, and the campaign has no output of its own.
    """
    campaign = CampaignFiles(directory)
    if not run_id and is_campaign(directory):
        if not campaign.log.exists():
            why = "never ran in the background, so it has no log"
            raise ConfigError(f"{directory}: {why}; name a run: {_listed(campaign, _runs(campaign))}")
        return Log(campaign.log, campaign.lock)
    files = find_run(directory, run_id)
    if campaign.log.exists() and not run_id:  # a single run's, in the background
        return Log(campaign.log, campaign.lock, beside=(files.output_log, *files.cluster_logs))
    above = files.directory.parent.parent if files.directory.parent.name == "runs" else directory
    return Log(files.output_log, files.lock, CampaignFiles(above).lock, files.done, files.cluster_logs)


def follow(path: Path, count: int, is_over: Callable[[], bool]) -> Iterator[str]:
    """Iterate over the last `count` lines of a log and those after them, safe to print.

    It ends once `is_over` returns True and the end is reached. A log that became shorter was replaced, and is
    read from its start; one that does not exist has no lines.
    """
    at, data = 0, b""
    with suppress(FileNotFoundError), opened(path) as fd:
        at, data = read_end(fd, count)
    at += len(data)
    *lines, rest = data.split(b"\n")
    yield from map(_printable, lines[-count:])
    while True:
        ends = is_over()  # called first, so that lines written before the end are still read below
        added = b""
        with suppress(FileNotFoundError), opened(path) as fd:
            size = os.fstat(fd).st_size
            if size < at:  # replaced, as by log rotation
                at, rest = 0, b""
            added = os.pread(fd, size - at, at)
        at += len(added)
        *lines, rest = (rest + added).split(b"\n")
        yield from map(_printable, lines)
        if ends:
            if rest:
                yield _printable(rest)
            return
        if not added:
            time.sleep(POLL_S)


def _printable(line: bytes) -> str:
    """Return a line with its blanks, which tables and tracebacks need, and nothing that a terminal obeys."""
    text = redacted(line[: 16 * _LONGEST_LINE].decode("utf-8", "replace"))  # megabytes cost nothing
    whole = " ".join(plain_lines(text))
    return whole if len(whole) <= _LONGEST_LINE else f"{whole[: _LONGEST_LINE - 1]}…"


def choose_samples(
    files: RunFiles, step: int | None, which: Which, count: int, source: str = ""
) -> list[KeptSample]:
    """Return samples of a run.

    Args:
        files: the run's.
        step: of this step only; None: of all kept ones for `which`, otherwise of the last.
        which: the highest or lowest rewards first, or those of tied groups; "" of one step, highest first.
        count: maximum number of samples.
        source: of this source of prompts only; "" of all.

    Raises:
        ConfigError: there are none of that step, or of that source; names the nearest steps, or the sources.
        RecordsError: there are none at all.
    """
    kept = list(samples_of(files.samples))
    if not kept:
        raise RecordsError(f"{files.samples}: holds no samples; a run writes them with its first step")
    if source:
        names = sorted({sample.source for sample in kept} - {""})
        kept = [sample for sample in kept if sample.source == source]
        if not kept:
            there = f"the sources are {', '.join(names)}" if names else "the run has a single source"
            raise ConfigError(f"{files.samples}: has no samples of source {source!r}; {there}")
    if step is None and not which:
        step = kept[-1].step
    samples = [sample for sample in kept if step is None or sample.step == step]
    if not samples:
        steps = sorted({sample.step for sample in kept})
        at = bisect_left(steps, step or 0)
        near = " and ".join(map(str, steps[max(0, at - 1) : at + 1]))
        raise ConfigError(f"{files.samples}: has no samples of step {step}; the nearest are of step {near}")
    if which == "ties":
        return [sample for sample in reversed(samples) if sample.tie][:count]
    sign = 1 if which == "worst" else -1
    scored = [(sample.reward, sample) for sample in samples if sample.reward is not None]
    ordered = [sample for _, sample in sorted(scored, key=lambda pair: (sign * pair[0], -pair[1].step))]
    if not which:
        ordered += [sample for sample in samples if sample.reward is None]
    return ordered[:count]
