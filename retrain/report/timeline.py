"""Where the time went: over workers, and within a step.

Records do not number workers, so attempts are packed into as few lanes as possible, in the order in which
they started: on one machine the lanes are its workers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.records.attempts import Attempt
from retrain.report.columns import FloatArray, unix_seconds
from retrain.report.gather import RunRecord
from retrain.report.series import counted
from retrain.report.sides import Side

SLACK_S = 0.02  # an attempt's end is written a moment before the next one's start
PIECES = 3000  # of waiting, in all bars together
MOST_PIECES = 60  # in one bar
PARTS = ("sampling", "waiting for permits", "rewards", "training", "other")
LEAST_SHARE = 0.005  # of a piece's time; less waiting is invisible


@dataclass(frozen=True)
class Bar:
    """One attempt at a run; times in seconds since the first one began."""

    lane: int  # from 1
    run_id: str
    condition: str
    attempt: int
    ending: str
    start_s: float
    end_s: float
    permit_wait_s: float


@dataclass(frozen=True)
class Waiting:
    """A piece of a bar, and the share of its time spent waiting for permits."""

    lane: int
    start_s: float
    end_s: float
    share: float  # at most 1, although the waits of concurrent calls add up to more


@dataclass(frozen=True)
class Timeline:
    """All attempts, and all waiting."""

    bars: tuple[Bar, ...]
    waiting: tuple[Waiting, ...]
    lanes: int


@dataclass(frozen=True)
class _Life:
    run: RunRecord
    attempt: Attempt
    start_s: float
    end_s: float


def timeline(runs: Sequence[RunRecord]) -> Timeline:
    """Assign all attempts with known times to lanes."""
    lives = sorted((life for run in runs for life in _lives(run)), key=lambda life: life.start_s)
    begin = lives[0].start_s if lives else 0.0
    free_from: list[float] = []
    bars: list[Bar] = []
    waiting: list[Waiting] = []
    for life in lives:
        lane = next((i for i, free in enumerate(free_from) if free <= life.start_s + SLACK_S), len(free_from))
        free_from[lane : lane + 1] = [life.end_s]
        pieces = max(1, min(MOST_PIECES, PIECES // len(lives)))
        waiting += _waiting(life, lane + 1, begin, pieces)
        bars.append(_bar(life, lane + 1, begin, float(_waits(life)[1].sum())))
    return Timeline(tuple(bars), tuple(waiting), len(free_from))


def _lives(run: RunRecord) -> Iterator[_Life]:
    starts = [unix_seconds(attempt.started_at) for attempt in run.attempts]
    following = [*starts, math.inf][1:]
    for attempt, start_s, next_s in zip(run.attempts, starts, following, strict=True):
        if math.isfinite(start_s):
            yield _Life(run, attempt, start_s, min(_end(run, attempt, start_s, next_s), next_s))


def _end(run: RunRecord, attempt: Attempt, start_s: float, next_s: float) -> float:
    """Return when an attempt ended; without a record of its end, the time of its last row."""
    if attempt.duration_s is not None and math.isfinite(attempt.duration_s):
        return start_s + max(0.0, attempt.duration_s)
    ended_s = unix_seconds(attempt.ended_at)
    if math.isfinite(ended_s):
        return max(start_s, ended_s)
    rows = run.columns.ends_s[(run.columns.ends_s >= start_s) & (run.columns.ends_s < next_s)]
    return float(rows.max(initial=start_s))


def _waits(life: _Life) -> tuple[FloatArray, FloatArray]:
    """Return when the attempt's rows were written, and how long each step waited."""
    ends_s = life.run.columns.ends_s
    inside = (ends_s >= life.start_s) & (ends_s <= life.end_s + SLACK_S)
    return ends_s[inside], np.nan_to_num(life.run.columns.metric("permit_wait_s")[inside])


def _waiting(life: _Life, lane: int, begin: float, pieces: int) -> Iterator[Waiting]:
    ends_s, waits = _waits(life)
    length = (life.end_s - life.start_s) / pieces
    if not waits.any() or length <= 0:
        return
    piece = np.clip(((ends_s - life.start_s) / length).astype(int), 0, pieces - 1)
    for number, wait_s in enumerate(np.bincount(piece, waits, pieces)):
        start_s = life.start_s - begin + number * length
        if wait_s >= LEAST_SHARE * length:
            yield Waiting(lane, start_s, start_s + length, min(1.0, float(wait_s) / length))


def _bar(life: _Life, lane: int, begin: float, wait_s: float) -> Bar:
    run, attempt = life.run, life.attempt
    ending = attempt.ending or (run.state if attempt is run.attempts[-1] else "died")
    start_s, end_s = life.start_s - begin, life.end_s - begin
    return Bar(lane, run.run_id, run.condition, attempt.number, ending, start_s, end_s, wait_s)


@dataclass(frozen=True)
class StepSplit:
    """Mean seconds of each of `PARTS` in a condition's steps."""

    condition: str
    seconds: tuple[float, ...]


def step_split(side: Side) -> StepSplit | None:
    """Return the mean parts of all steps of a condition; None if no row has times.

    Waiting for permits happens while sampling (or while training, on a remote backend). It is summed over
    concurrent calls, so it is limited to the time of sampling.
    """
    runs = [run for run in counted(side.runs) if np.isfinite(run.columns.metric("step_time_s")).any()]
    if not runs:
        return None
    names = ("step_time_s", "sample_time_s", "permit_wait_s", "reward_time_s", "train_time_s")
    rows = np.concatenate([np.stack([run.columns.metric(name) for name in names]) for run in runs], axis=1)
    step, sample, wait, reward, train = np.nan_to_num(rows[:, np.isfinite(rows[0])])
    wait = np.minimum(wait, sample)
    other = np.maximum(0.0, step - sample - reward - train)
    return StepSplit(side.label, tuple(float(x.mean()) for x in (sample - wait, wait, reward, train, other)))


def step_splits(sides: Sequence[Side]) -> tuple[StepSplit, ...]:
    """Return the split of every condition that has times."""
    found = (step_split(side) for side in sides)
    return tuple(one for one in found if one is not None)
