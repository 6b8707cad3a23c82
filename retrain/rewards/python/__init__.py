"""Whether a program passes its tests, run in a process with limits.

The limits (time, memory, file size, open files; processes too unless run as root) keep accidents of a
policy that is learning to program from stopping the run. They are NOT a security boundary: the program
runs as this user, sees this machine's files and network, and code written to deceive can deceive the
check. Run campaigns with this reward in a container or virtual machine that holds nothing precious.
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
CLEANUP_S = 5.0  # the process that watches a program ends it; only if that fails the pool steps in


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
        completion: the program is its last fenced block of Python, or all of it.
        prompt: its answer holds the tests.
        tests: "asserts": the answer is Python that runs after the program, in its namespace, and
            raises if it is wrong. "stdio": the answer is a JSON list of objects with "input" and
            "output", compared by lines, blanks at their ends put aside; a program that ends with an
            error or another exit status than 0 has failed, whatever it printed.
        timeout_s: limit of all tests of a completion together, from when they begin.
        workers: programs that run at a time; 0 is one for each core.
        memory_mb: limit of a program's memory (Linux).

    Raises:
        TimeoutError: the program did not finish in time.
        UnscoredError: the answer holds no tests that can be run.
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
    """Return what is wrong with the parameters."""
    yield from limit_problems(params)
    yield from choice_problem("tests", params.get("tests", "asserts"), ("asserts", "stdio"))
