"""Signs that a policy cheats: programs that break rules, and rewards that jump where held-out rewards do not.

A sign is a reason to read completions, not a verdict: a policy may also learn a task in one jump.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.records.text import count_of, plain
from retrain.report.columns import FloatArray
from retrain.report.gather import RunHistory
from retrain.report.sides import Side

WINDOW = 5  # steps before and after a jump: enough to tell it from one lucky batch
LEAST_RISE = 0.1  # in the reward's unit; most rewards lie in [0, 1]
NOISE = 4.0  # standard errors of the rise: once in thousands of windows by chance
SHARED = 0.5  # of the rise, by which the held-out reward must rise as well


@dataclass(frozen=True)
class Jump:
    """A sudden rise of the reward that the held-out reward does not share."""

    step: int  # the first after the jump
    rise: float
    held_out_rise: float


def find_jump(steps: Sequence[int], reward: FloatArray, held_out: FloatArray) -> Jump | None:
    """Return the largest jump of the reward, unless the held-out reward shares it.

    Args:
        steps: ascending, one per row.
        reward: mean reward of each step; NaN where it is unknown.
        held_out: held-out reward; NaN in steps without an evaluation.

    Returns:
        None if nothing jumps, or no evaluation is on one of its sides.
    """
    found: Jump | None = None
    for at in range(WINDOW, len(reward) - WINDOW + 1):
        before, after = reward[at - WINDOW : at], reward[at : at + WINDOW]
        rise = float(after.mean() - before.mean())
        error = float(np.sqrt((before.var(ddof=1) + after.var(ddof=1)) / WINDOW))
        if not rise > max(LEAST_RISE, NOISE * error, found.rise if found else 0.0):  # also if NaN
            continue
        evaluated = held_out[:at], held_out[at + WINDOW - 1 :]
        sides = [values[np.isfinite(values)] for values in evaluated]
        if all(map(len, sides)) and (gain := float(sides[1][0] - sides[0][-1])) < SHARED * rise:
            found = Jump(int(steps[at]), rise, gain)
    return found


def signs(sides: Sequence[Side]) -> Iterator[str]:
    """Iterate over signs of cheating, in sentences."""
    for side in sides:
        yield from _faults(side)
        for run in side.runs:
            columns = run.columns
            jump = find_jump(
                columns.steps.tolist(), columns.metric("mean_reward"), columns.metric("eval_reward")
            )
            if jump:
                yield (
                    f"{plain(run.run_id)}: the reward jumps by {jump.rise:.2g} at step {jump.step}, the "
                    f"held-out reward changes by {jump.held_out_rise:.2g}; read the samples of that step."
                )


def _faults(side: Side) -> Iterator[str]:
    """Describe the completions that broke rules or took too long."""
    scored = sum(_sum(run, "batch_size", "group_size") for run in side.runs)
    faults = sum(_sum(run, "reward_faults") for run in side.runs)
    late = sum(_sum(run, "reward_timeout_fraction", "batch_size", "group_size") for run in side.runs)
    if scored and (faults or late):
        yield (
            f"{plain(side.label)}: {faults / scored:.2g} of completions did what no solution does "
            f"({count_of(round(faults), 'fault')}), {late / scored:.2g} took too long."
        )


def _sum(run: RunHistory, *names: str) -> float:
    """Return the sum over steps of a product of metrics."""
    return float(np.nansum(np.prod([run.columns.metric(name) for name in names], axis=0)))
