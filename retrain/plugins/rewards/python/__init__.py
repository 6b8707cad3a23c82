"""Whether a program passes its tests, run in a sandbox; see `plugins/sandbox` for what each keeps out.

The verdict is reached outside of the sandbox. Limits of time, memory, files and system calls apply to each
program, whatever the sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from retrain.base.errors import Problem
from retrain.base.registry import Megabytes, Positive, Workers
from retrain.plugins.rewards import BatchScorer, score_with
from retrain.plugins.rewards.python.scorer import ProgramRunner, ProgramScorer
from retrain.plugins.sandbox import choice_problems, choose

RANGE = (0.0, 1.0)
PURE = True


def open_scorer(
    *,
    tests: Literal["asserts", "stdio"] = "asserts",
    timeout_s: Positive = 10.0,
    workers: Workers = 0,
    memory_mb: Megabytes = 1024,
    shared: bool = False,
    sandbox: str = "auto",
    sandbox_options: Mapping[str, Any] | None = None,
) -> BatchScorer:
    """Score 1 if the program passes all tests, which the answer contains, else 0.

    The program is the last fenced block of Python that defines something, or for "stdio" calls something,
    and does not only use an earlier one; else the whole text. A completion is unscored if the answer
    contains no tests that can be run.

    Args:
        tests: "asserts": the answer is Python that calls the program's functions and classes, and
            raises if they are wrong; see `shared`. "stdio": the answer is a JSON list of objects with
            "input" and "output", compared by line without trailing blanks; a program with an exit
            status other than 0 fails, regardless of its output.
        timeout_s: limit of all tests of a completion together, from their start.
        workers: number of programs that run at a time; 0 is one per core.
        memory_mb: limit of a program's memory (Linux).
        shared: run the tests in the program's own interpreter, for tests that subclass its classes or
            patch it; a program can then forge its result. By default they run in a sandbox of their own.
        sandbox: where programs run, a plugin; "auto" takes the strongest that works here. In a campaign,
            `[reward].sandbox` sets it for all rewards that name none.
        sandbox_options: its options.
    """
    opened = choose(sandbox, sandbox_options or {})
    return ProgramScorer(ProgramRunner(opened, tests, timeout_s, memory_mb << 20, shared), workers)


score = score_with(open_scorer)


def check_params(params: Mapping[str, Any]) -> Iterator[Problem]:
    """Return the problems of a sandbox that the parameters name."""
    yield from choice_problems(params)


def advise_params(params: Mapping[str, Any]) -> Iterator[str]:
    """Return a warning about tests that a program can reach."""
    if params.get("shared"):
        yield "shared = true: a program can reach the tests that share its interpreter, and forge its result"
