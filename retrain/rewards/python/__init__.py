"""Whether a program passes its tests, run in a sandbox; see `retrain.sandbox` for what each one keeps out.

The verdict is reached outside of the sandbox. Limits of time, memory, files and system calls apply to each
program, whatever the sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrain.rewards import BatchScorer
from retrain.rewards.limits import choice_problem, limit_problems
from retrain.rewards.pool.scorer import score_one
from retrain.rewards.python.scorer import ProgramScorer
from retrain.rollouts import Prompt
from retrain.sandbox.choice import choose

MEGABYTE = 1 << 20
RANGE = (0.0, 1.0)


def score(
    completion: str,
    prompt: Prompt,
    *,
    tests: str = "asserts",
    timeout_s: float = 10.0,
    workers: int = 0,
    memory_mb: int = 1024,
    shared: bool = False,
    sandbox: str = "auto",
    sandbox_options: Mapping[str, Any] | None = None,
) -> float:
    """Return 1 if the program passes all tests, else 0.

    Args:
        completion: the program is the last fenced block of Python, else the whole text.
        prompt: its answer contains the tests.
        tests: "asserts": the answer is Python that calls the program's functions and classes, and
            raises if they are wrong; see `shared`. "stdio": the answer is a JSON list of objects with
            "input" and "output", compared by line without trailing blanks; a program with an exit
            status other than 0 fails, regardless of its output.
        timeout_s: limit of all tests of a completion together, from their start.
        workers: number of programs that run at a time; 0 is one per core.
        memory_mb: limit of a program's memory (Linux).
        shared: run the tests in the program's own interpreter, for tests that subclass its classes or
            patch it; a program can then forge its verdict. By default they run in a sandbox of their own.
        sandbox: where programs run, a plugin; "auto" takes the strongest that works here. In a campaign,
            `[reward].sandbox` sets it for all rewards.
        sandbox_options: its options.

    Raises:
        TimeoutError: the program did not finish in time.
        UnscoredError: the answer contains no tests that can be run.
    """
    scorer = open_scorer(
        tests=tests,
        timeout_s=timeout_s,
        workers=workers,
        memory_mb=memory_mb,
        shared=shared,
        sandbox=sandbox,
        sandbox_options=sandbox_options,
    )
    return score_one(scorer, completion, prompt)


def open_scorer(
    *,
    tests: str = "asserts",
    timeout_s: float = 10.0,
    workers: int = 0,
    memory_mb: int = 1024,
    shared: bool = False,
    sandbox: str = "auto",
    sandbox_options: Mapping[str, Any] | None = None,
) -> BatchScorer:
    """Open a scorer; parameters as for `score`."""
    chosen = choose(sandbox, sandbox_options or {})
    return ProgramScorer(
        chosen,
        tests=tests,
        timeout_s=timeout_s,
        workers=workers,
        memory_bytes=memory_mb * MEGABYTE,
        shared=shared,
    )


def check_params(params: Mapping[str, Any]) -> Iterator[str]:
    """Return the problems of the parameters."""
    yield from limit_problems(params)
    yield from choice_problem("tests", params.get("tests", "asserts"), ("asserts", "stdio"))


def advise_params(params: Mapping[str, Any]) -> Iterator[str]:
    """Return a warning about tests that a program can reach."""
    if params.get("shared"):
        yield "shared = true: a program can reach the tests that share its interpreter, and forge its verdict"
