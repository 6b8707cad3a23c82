"""Signs of cheating that a report names: reasons to read completions, not verdicts.

- Programs that broke rules of the sandbox, ran into limits or took too long.
- A reward that jumps where the held-out reward does not; a policy may also learn a task in one jump.
- An `[[eval]]` that falls while the reward rises, as the run itself found (`trainer/evaluation.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules.signs import deviation, window_rises
from retrain.records.text import count_of, plain
from retrain.results.report.gather import RunHistory
from retrain.results.report.sides import Side

WINDOW = 5  # steps before and after a jump: enough to tell it from one lucky batch
LEAST_RISE = 0.1  # in the reward's unit; most rewards lie in [0, 1]
NEAR = 50  # steps before and after, whose noise is that of a jump: by five the error may seem far too small
NOISE = 4.0  # standard errors of the rise: once in ten thousands of windows by chance
UNUSUAL = 4.2  # times the run's usual rises: by chance in 2 % of runs of 500 steps, also if steps are alike
SHARED = 0.5  # of the rise: the held-out reward rose by as much, or lies no further below the reward


@dataclass(frozen=True)
class Jump:
    """A sudden rise of the reward that the held-out reward does not share."""

    step: int  # the first after the jump
    rise: float
    held_out_rise: float


def find_jump(steps: Sequence[int], reward: Floats, held_out: Floats) -> Jump | None:
    """Return the largest jump of the reward, unless the held-out reward shares it or was as high already.

    Args:
        steps: ascending, one per row.
        reward: mean reward of each step; NaN where it is unknown.
        held_out: held-out reward; NaN in steps without an evaluation.

    Returns:
        None if nothing jumps, or no evaluation is on one of its sides.
    """
    jump: Jump | None = None
    rises = window_rises(reward, WINDOW)
    least = max(LEAST_RISE, UNUSUAL * deviation(rises))
    for at, rise in enumerate(rises.tolist(), start=WINDOW):
        if not rise > (jump.rise if jump else least):  # also if NaN
            continue
        before, after = reward[at - WINDOW : at], reward[at : at + WINDOW]
        changes = np.diff(reward[max(0, at - NEAR) : at + NEAR])  # of both sides: twice the variance of one
        variance = max(before.var(ddof=1) + after.var(ddof=1), np.nanmean(changes**2))
        if rise <= NOISE * math.sqrt(variance / WINDOW):
            continue
        evaluated = held_out[:at], held_out[at + WINDOW - 1 :]
        sides = [values[np.isfinite(values)] for values in evaluated]
        if not all(map(len, sides)):
            continue
        gain, behind = float(sides[1][0] - sides[0][-1]), float(after.mean() - sides[1][0])
        if gain < SHARED * rise < behind:
            jump = Jump(int(steps[at]), rise, gain)
    return jump


def signs_of_cheating(sides: Sequence[Side]) -> Iterator[str]:
    """Iterate over the signs in all runs, in sentences."""
    for side in sides:  # completions that broke rules, ran into limits or took too long
        scored = sum(_sum(run, "batch_size", "group_size") for run in side.runs)
        faults = sum(_sum(run, "reward_faults") for run in side.runs)
        over = sum(_sum(run, "reward_over_limits") for run in side.runs)
        late = sum(_sum(run, "reward_timeout_fraction", "batch_size", "group_size") for run in side.runs)
        if scored and (faults or over or late):
            yield (
                f"{plain(side.label)}: {faults / scored:.2g} of completions broke a rule of the sandbox "
                f"({count_of(round(faults), 'fault')}), {over / scored:.2g} ran out of memory or files, "
                f"{late / scored:.2g} took too long."
            )
        for run in side.runs:
            metric = run.columns.metric
            if jump := find_jump(run.columns.steps.tolist(), metric("mean_reward"), metric("eval_reward")):
                yield (
                    f"{plain(run.name)}: the reward jumps by {jump.rise:.2g} at step {jump.step}, the "
                    f"held-out reward changes by {jump.held_out_rise:.2g}; read the samples of that step."
                )
            if run.eval_falling:
                yield f"{plain(run.name)}: the reward rises, but {run.eval_falling}; read its best samples."


def _sum(run: RunHistory, *names: str) -> float:
    """Return the sum over steps of a product of metrics."""
    return float(np.nansum(np.prod([run.columns.metric(name) for name in names], axis=0)))
