r"""reasoning-gym's own scoring, which accepts every correct answer and gives partial credit.

For `[data] task = "reasoning_gym"` with `answers = "entry"`. The final answer is the content of the last
`\boxed{...}`, else of the last `<answer>...</answer>`, else the whole completion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrain.rewards import BatchScorer
from retrain.rewards.limits import limit_problems
from retrain.rewards.pool import ProcessPool
from retrain.rewards.pool.scorer import VerifierScorer, score_one
from retrain.rollouts import Prompt

EXTRA = "reasoning-gym"
PACKAGES = ("reasoning_gym",)
RANGE = (0.0, 1.0)


def score(completion: str, prompt: Prompt, *, timeout_s: float = 10.0, workers: int = 0) -> float:
    """Return reasoning-gym's score of the final answer, 0 to 1.

    Args:
        completion: text of the completion.
        prompt: its answer identifies the entry, as the task `reasoning_gym` writes it.
        timeout_s: limit of one check, from its start.
        workers: number of checking processes; 0 is one per core.

    Raises:
        ConfigError: reasoning-gym is not installed.
        TimeoutError: the check took longer than `timeout_s`.
        UnscoredError: the prompt identifies no entry, or the check failed.
    """
    return score_one(open_scorer(timeout_s=timeout_s, workers=workers), completion, prompt)


def open_scorer(*, timeout_s: float = 10.0, workers: int = 0) -> BatchScorer:
    """Open a pool of checking processes; parameters as for `score`."""
    return VerifierScorer(
        ProcessPool("retrain.rewards.reasoning_gym.check.check", {}, workers=workers, timeout_s=timeout_s)
    )


def check_params(params: Mapping[str, Any]) -> Iterator[str]:
    """Return the problems of the parameters."""
    yield from limit_problems(params)
