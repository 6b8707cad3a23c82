r"""Mathematical equality by math-verify: `\frac{1}{2}`, `0.5` and `1/2` are the same answer.

Every check runs in a killable process, with the same limits in any thread. A completion whose check hangs or
fails gets 0; if the reference answer is the cause, the completion is unscored.

Source: math-verify, which extracts answers with regular expressions and compares them with SymPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from retrain.rewards import Answer, BatchScorer, Outcome, Score
from retrain.rewards.limits import limit_problems
from retrain.rewards.pool import ProcessPool
from retrain.rewards.pool.scorer import VerifierScorer, score_one
from retrain.rollouts import Prompt

EXTRA = "math"
PACKAGES = ("math_verify",)
RANGE = (0.0, 1.0)
MEGABYTE = 1 << 20


def score(
    completion: str, prompt: Prompt, *, timeout_s: float = 5.0, workers: int = 0, memory_mb: int = 2048
) -> float:
    r"""Return 1 if the last `\boxed{...}`, else the last expression in the completion, equals the answer.

    Args:
        completion: text of the completion.
        prompt: its answer is LaTeX, with or without `$` or `\boxed`, or a plain number or expression.
        timeout_s: limit of one check, from its start; a check usually takes some milliseconds.
        workers: number of checking processes; 0 is one per core.
        memory_mb: limit of a process's memory (Linux), since an expression can need any amount.

    Raises:
        ConfigError: math-verify is not installed.
        TimeoutError: the check took longer than `timeout_s`.
        UnscoredError: the answer cannot be parsed, or the check failed.
    """
    return score_one(
        open_scorer(timeout_s=timeout_s, workers=workers, memory_mb=memory_mb), completion, prompt
    )


def open_scorer(*, timeout_s: float = 5.0, workers: int = 0, memory_mb: int = 2048) -> BatchScorer:
    """Open a pool of checking processes; parameters as for `score`."""
    target = "retrain.rewards.math.check.check"
    memory_bytes = memory_mb * MEGABYTE
    return MathScorer(
        ProcessPool(target, {}, workers=workers, timeout_s=timeout_s, memory_bytes=memory_bytes)
    )


class MathScorer(VerifierScorer):
    """Scores with math-verify; after a check that failed, it checks the reference answer as well."""

    def __init__(self, pool: ProcessPool) -> None:
        super().__init__(pool)
        self._readable: dict[str, bool] = {}

    def score_all(self, answers: Sequence[Answer]) -> list[Score]:
        scores = super().score_all(answers)
        has_failed = [score.value == 0 and score.outcome is not Outcome.SCORED for score in scores]
        for answer, failed in zip(answers, has_failed, strict=True):
            if failed and answer.prompt.answer not in self._readable:
                self._readable[answer.prompt.answer] = self._is_readable(answer.prompt)
        return [
            Score(None, score.outcome, f"the reference answer may be the cause: {score.message}")
            if failed and not self._readable[answer.prompt.answer]
            else score
            for answer, score, failed in zip(answers, scores, has_failed, strict=True)
        ]

    def _is_readable(self, prompt: Prompt) -> bool:
        """Whether a reference answer is equal to itself, and can be compared with a number."""
        itself, number = super().score_all([Answer(prompt.answer, prompt), Answer("0", prompt)])
        return itself.value == 1 and number.outcome is Outcome.SCORED


def check_params(params: Mapping[str, Any]) -> Iterator[str]:
    """Return the problems of the parameters."""
    yield from limit_problems(params)
