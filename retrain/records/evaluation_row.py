"""The parts of a row that evaluations write, on held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from retrain.records.row_parts import measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The policy on held-out prompts, in steps that are evaluated."""

    PREFIX: ClassVar[str] = "eval_"
    reward: float = measured("reward", "mean reward of greedy completions")
    correct_rate: float = measured("fraction", "share of them with a reward of 1")
    prompts: int = measured("prompts", "held-out prompts")
    reward_error_fraction: float = measured("fraction", "share of completions whose scoring failed")
    reward_timeout_fraction: float = measured("fraction", "share of completions whose scoring took too long")
    pass_at: Mapping[str, float | None] = measured(
        "fraction", "chance that one of K samples is right; with `eval_samples`", key="eval_pass_at_K"
    )
    time_s: float = measured("s", "how long it took; not part of `step_time_s`")
    billed: Mapping[str, int] = measured(
        "tokens", "that it was billed, by kind: `prefill`, `cached`, `sample`", key="eval_billed_KIND"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedEvaluation:
    """An `[[eval]]` called NAME, in steps in which it is due. Each prompt counts once, by its mean."""

    PREFIX: ClassVar[str] = "eval_NAME_"
    reward: float = measured("reward", "mean reward")
    reward_se: float | None = measured(
        "reward", "its standard error over prompts, whose samples are not independent; null for one prompt"
    )
    correct_rate: float = measured("fraction", "mean share of a prompt's completions with a reward of 1")
    correct_rate_se: float | None = measured(
        "fraction", "its standard error over prompts; null for one prompt"
    )
    prompts: int = measured("prompts", "held-out prompts with a scored completion")
    reward_error_fraction: float = measured("fraction", "share of completions whose scoring failed")
    reward_timeout_fraction: float = measured("fraction", "share of completions whose scoring took too long")
    pass_at: Mapping[str, float | None] = measured(
        "fraction", "chance that one of K samples is right; with `samples`", key="eval_NAME_pass_at_K"
    )
    pass_at_se: Mapping[str, float | None] = measured(
        "fraction", "its standard error over prompts", key="eval_NAME_pass_at_se_K"
    )
    time_s: float = measured("s", "how long it took; not part of `step_time_s`")
    billed: Mapping[str, int] = measured(
        "tokens", "that it was billed, by kind: `prefill`, `cached`, `sample`", key="eval_NAME_billed_KIND"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalWatch:
    """Every `[[eval]]` beside the reward."""

    PREFIX: ClassVar[str] = "eval_"
    falling: str = measured(
        "", "those that fell although the reward rose, with figures; questions do not explain it"
    )
