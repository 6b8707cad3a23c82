r"""Mathematical equality by math-verify: `\frac{1}{2}`, `0.5` and `1/2` are the same answer.

Every check runs in a killable process. A check that hangs is counted as a timeout, a check that fails as
an error; neither is silently a wrong answer.

Source: math-verify, which extracts answers with regular expressions and compares them with SymPy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrain.rewards import BatchScorer
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
    return VerifierScorer(
        ProcessPool(target, {}, workers=workers, timeout_s=timeout_s, memory_bytes=memory_bytes)
    )


def check_params(params: Mapping[str, Any]) -> Iterator[str]:
    """Return the problems of the parameters."""
    yield from limit_problems(params)
