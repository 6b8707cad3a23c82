"""Selects samples of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from retrain.errors import RecordsError
from retrain.records.layout import RunFiles
from retrain.records.lines import number_in
from retrain.records.samples import read_samples

Which = Literal["", "best", "worst", "ties"]


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One kept rollout. Its texts come from a policy or a data set and are not safe to print."""

    step: int
    prompt_id: int | None
    prompt: str
    answer: str
    completion: str
    reward: float | None  # None: could not be scored
    advantage: float | None
    tie: bool  # its whole group had the same reward: no learning signal
    tokens: int | None
    truncated: bool


def choose(files: RunFiles, step: int | None, which: Which, count: int) -> list[ShownSample]:
    """Return samples of a run.

    Args:
        files: the run's.
        step: of this step only; None: of all kept ones for `which`, otherwise of the last.
        which: the highest or lowest rewards first, or those of tied groups; "" of one step, highest first.
        count: maximum number of samples.

    Raises:
        RecordsError: there are none, or none of that step; names the nearest steps.
    """
    found = [sample for row in read_samples(files.samples) if (sample := _sample(row))]
    if not found:
        raise RecordsError(f"{files.samples}: holds no samples; a run writes them with its first step")
    if step is None and not which:
        step = found[-1].step
    if step is not None:
        steps = sorted({sample.step for sample in found})
        found = [sample for sample in found if sample.step == step]
        if not found:
            raise RecordsError(
                f"{files.samples}: has no samples of step {step}; the nearest are of {_near(steps, step)}"
            )
    return _ordered(found, which)[:count]


def _ordered(samples: Sequence[ShownSample], which: Which) -> list[ShownSample]:
    if which == "ties":
        return [sample for sample in reversed(samples) if sample.tie]
    sign = 1 if which == "worst" else -1
    scored = [(sample.reward, sample) for sample in samples if sample.reward is not None]
    ordered = [sample for _, sample in sorted(scored, key=lambda pair: (sign * pair[0], -pair[1].step))]
    return ordered if which else [*ordered, *(sample for sample in samples if sample.reward is None)]


def _near(steps: Sequence[int], step: int) -> str:
    below = [str(other) for other in steps if other < step][-1:]
    above = [str(other) for other in steps if other > step][:1]
    return f"step {' and '.join(below + above)}"


def _sample(row: Mapping[str, Any]) -> ShownSample | None:
    reward = number_in(row, "reward")
    if reward is None and row.get("reward", "") is not None:
        return None
    return ShownSample(
        step=row["step"],
        prompt_id=_integer(row.get("prompt_id")),
        prompt=str(row.get("prompt", "")),
        answer=str(row.get("answer", "")),
        completion=str(row.get("completion", "")),
        reward=reward,
        advantage=number_in(row, "advantage"),
        tie=row.get("tie") is True,
        tokens=_integer(row.get("tokens")),
        truncated=row.get("truncated") is True,
    )


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
