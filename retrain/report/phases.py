"""Where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.report.series import counted
from retrain.report.sides import Side

PARTS = ("sampling", "waiting for permits", "rewards", "training", "other")


@dataclass(frozen=True)
class StepSplit:
    """Mean seconds of each of `PARTS` in a condition's steps."""

    condition: str
    seconds: tuple[float, ...]


def step_split(side: Side) -> StepSplit | None:
    """Average the parts of all steps of a condition; None if no row has times.

    Waiting for permits happens while sampling (or while training, on a remote backend); of calls that wait
    beside each other it is the sum, so it is shown as at most the time of sampling.
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
