"""Whether a program passes its tests, run in a process with limits.

The limits (time, memory, file size, open files; also processes unless run as root) keep a policy's faulty
programs from stopping the run. They are NOT a security boundary: the program runs as this user, has
access to this machine's files and network, and malicious code can deceive the check. Run campaigns with
this reward in a container or virtual machine without valuable data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrain.rewards import BatchScorer
from retrain.rewards.limits import choice_problem, limit_problems
from retrain.rewards.pool import ProcessPool
from retrain.rewards.pool.scorer import VerifierScorer, score_one
from retrain.rollouts import Prompt

MEGABYTE = 1 << 20
RANGE = (0.0, 1.0)
CLEANUP_S = 5.0  # normally the process that watches a program ends it; the pool is the fallback


def score(
    completion: str,
    prompt: Prompt,
    *,
    tests: str = "asserts",
    timeout_s: float = 10.0,
    workers: int = 0,
    memory_mb: int = 1024,
) -> float:
    """Return 1 if the program passes all tests, else 0.

    Args:
        completion: the program is the last fenced block of Python, else the whole text.
        prompt: its answer contains the tests.
        tests: "asserts": the answer is Python that runs after the program, in its namespace, and
            raises if it is wrong. "stdio": the answer is a JSON list of objects with "input" and
            "output", compared by line without trailing blanks; a program with an exit status other
            than 0 fails, regardless of its output.
        timeout_s: limit of all tests of a completion together, from their start.
        workers: number of programs that run at a time; 0 is one per core.
        memory_mb: limit of a program's memory (Linux).

    Raises:
        TimeoutError: the program did not finish in time.
        UnscoredError: the answer contains no tests that can be run.
    """
    scorer = open_scorer(tests=tests, timeout_s=timeout_s, workers=workers, memory_mb=memory_mb)
    return score_one(scorer, completion, prompt)


def open_scorer(
    *, tests: str = "asserts", timeout_s: float = 10.0, workers: int = 0, memory_mb: int = 1024
) -> BatchScorer:
    """Open a pool of processes that run programs; parameters as for `score`."""
    params = {"tests": tests, "timeout_s": timeout_s, "memory_bytes": memory_mb * MEGABYTE}
    return VerifierScorer(
        ProcessPool(
            "retrain.rewards.python.program.check", params, workers=workers, timeout_s=timeout_s + CLEANUP_S
        )
    )


def check_params(params: Mapping[str, Any]) -> Iterator[str]:
    """Return the problems of the parameters."""
    yield from limit_problems(params)
    yield from choice_problem("tests", params.get("tests", "asserts"), ("asserts", "stdio"))
