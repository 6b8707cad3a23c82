"""Scores programs: they run in a sandbox, and what they print or return is compared here."""

from __future__ import annotations

import ast
import io
import itertools
import json
import queue
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any

from retrain.plugins.rewards import Answer, Outcome, Score, UnscoredError
from retrain.plugins.rewards.python.fences import parse, program_of
from retrain.plugins.rewards.threads import ThreadedScorer
from retrain.plugins.sandbox import Limits, ProgramEnd, Sandbox, SandboxEndedError, SandboxError, choose
from retrain.plugins.sandbox.cell import Cell
from retrain.plugins.sandbox.inside import values
from retrain.plugins.sandbox.inside.reading import runs_only_the_programs_doctests

VERDICT_BYTES = 1 << 16
SUBCLASSED = "the tests subclass a class of the program, which needs shared = true"
NO_VERDICT = {
    "passed": False,
    "garbage": "",
    "used": False,
    "needs_sharing": False,
    "missing": "",
    "doubt": "",
    "hides_changes": False,
}


class FaultError(Exception):
    """A program did what no solution does; the message says what."""


class ProgramScorer(ThreadedScorer):
    """Scores several programs at a time."""

    def __init__(self, runner: ProgramRunner, workers: int) -> None:
        """Start nothing yet; each of `workers` is such a runner, 0 is one per core."""
        super().__init__(workers, "programs")
        self.sandbox = runner.sandbox.name
        self._runners = [replace(runner) for _ in range(self.count)]
        self._free: queue.SimpleQueue[ProgramRunner] = queue.SimpleQueue()
        for free_runner in self._runners:
            self._free.put(free_runner)

    def close(self) -> None:
        """End all processes; safe to call twice."""
        super().close()
        for runner in self._runners:
            runner.is_closed = True
            runner.close_cells()

    def score_one(self, answer: Answer) -> Score:
        runner = self._free.get()
        try:
            score = runner.score(answer)
            return replace(score, is_over_limit=runner.is_over_limit)
        finally:
            self._free.put(runner)


@dataclass(slots=True)
class ProgramRunner:
    """Scores one program at a time, in a sandbox that is open from the first program on."""

    sandbox: Sandbox
    tests: str
    timeout_s: float
    memory_bytes: int
    shared: bool = False
    cells: dict[str, Cell] = field(default_factory=dict, init=False)
    is_closed: bool = field(default=False, init=False)
    denied: int = field(default=0, init=False)  # calls and paths that the program was denied
    is_over_limit: bool = field(default=False, init=False)

    def cell(self, use: str = "programs") -> Cell:
        """Return an open sandbox, one for each use; tests need one that takes descriptors."""
        if self.is_closed:
            raise SandboxError("closed while a program ran")
        if use not in self.cells:
            is_local = use == "programs" or not self.sandbox.single_use
            self.cells[use] = Cell(self.sandbox if is_local else choose("process", {}))
        return self.cells[use]

    def denial(self) -> str:
        """Return what the program was denied, in words."""
        return f"the program was denied {self.denied} calls or paths"

    def close_cells(self) -> None:
        """End the sandbox; the next program opens another one."""
        while self.cells:
            self.cells.popitem()[1].close()

    def score(self, answer: Answer) -> Score:
        """Return the score of a completion; a program that hangs or misbehaves gets 0."""
        try:
            try:
                value = float(self._passes(answer))
            except SandboxEndedError:  # once may be an accident
                self.close_cells()
                value = float(self._passes(answer))
            if self.denied:  # a sign, whose completion keeps its score
                return Score(value, Outcome.FAULT, self.denial())
            return Score(value)
        except TimeoutError as error:
            if self.denied:  # the graver sign
                return Score(0.0, Outcome.FAULT, f"{error}; {self.denial()}")
            return Score(0.0, Outcome.TIMEOUT, str(error))
        except FaultError as error:
            return Score(0.0, Outcome.FAULT, str(error))
        except UnscoredError as error:
            return Score(None, Outcome.ERROR, str(error), is_unjudged=True)
        except SandboxEndedError as error:
            self.close_cells()
            return Score(0.0, Outcome.FAULT, str(error))
        except (SandboxError, OSError) as error:  # no memory for another process, say
            self.close_cells()
            return Score(None, Outcome.ERROR, str(error))

    def _passes(self, answer: Answer) -> bool:
        self.denied, self.is_over_limit = 0, False
        tests = answer.prompt.answer
        program = program_of(answer.completion, reads_input=self.tests == "stdio")
        is_apart = self.tests == "asserts" and not self.shared
        for use in ("programs", "tests") if is_apart else ("programs",):
            self.cell(use)  # opened before the time counts
        deadline = time.monotonic() + self.timeout_s
        if self.tests == "stdio":
            for stdin, stdout in cases_of(tests):
                job = {"job": "stdio", "source": program, "input": stdin}
                ended, output = self._run(job, deadline, values.LONGEST_FRAME)
                if output is None:
                    if len(stdout.encode("utf-8", "replace")) < values.LONGEST_FRAME:
                        raise FaultError(f"the program wrote more than {values.LONGEST_FRAME >> 10} KB")
                    raise UnscoredError(f"program and tests print more than {values.LONGEST_FRAME >> 10} KB")
                if ended.code != 0 or not are_alike(output.decode("utf-8", "replace"), stdout):
                    return False
            return True
        assertions = checked_tests(tests)
        if self.shared:
            token = secrets.token_hex(16)
            job = {"job": "shared", "source": program, "tests": tests, "token": token}
            verdict = self._run(job, deadline, VERDICT_BYTES)[1]
            if verdict is None:
                raise FaultError(f"the program wrote more than {VERDICT_BYTES >> 10} KB")
            return verdict == values.frame([token, assertions])
        return self._reaches_end(program, tests, deadline)

    def _reaches_end(self, program: str, tests: str, deadline: float, *, changes: str = "") -> bool:
        """Run tests in one sandbox against a program in another.

        `changes`, if not empty: functions may change all arguments, as in plain Python.
        """
        limits = self._limits(deadline)
        answering = self.cell().start(limits)
        try:
            job = {"job": "tests", "source": program, "tests": tests, "changes": changes}
            judge = self.cell("tests")
            testing = judge.start(limits, *[answering.fileno()] * 2)
            answering.close()
            verdict = testing.output(job, VERDICT_BYTES)
            is_over = not judge.ended(stop=verdict is None).in_time
        finally:
            answering.close()
            ended = self.cell().ended(stop=True)
        self._check(ended, is_over=is_over)
        report = read_verdict(verdict) if verdict else NO_VERDICT
        if not (report["passed"] or ended.is_known):
            raise SandboxEndedError("the sandbox has ended while tests used the program")
        if report["garbage"]:
            raise FaultError(f"the program's answer cannot be read: {report['garbage']}")
        if report["passed"]:
            if not report["used"] or runs_only_the_programs_doctests(tests):
                raise UnscoredError("the tests pass without the program, or run nothing of their own")
            return not report["hides_changes"] or self._reaches_end(program, tests, deadline, changes="all")
        if report["missing"]:
            raise UnscoredError(report["missing"])
        doubt = SUBCLASSED if report["needs_sharing"] else report["doubt"]
        if doubt:  # do they pass in the program's own interpreter, where it could forge that?
            job = {"job": "plain", "source": program, "tests": tests}
            _, output = self.cell().run(self._limits(deadline), job, VERDICT_BYTES)
            if output == values.frame(True):
                raise UnscoredError(doubt)
        return False

    def _run(self, job: dict[str, str], deadline: float, most: int) -> tuple[ProgramEnd, bytes | None]:
        """Run a program; return how it ended, and its output, None if it is too long; errors as `_check`."""
        ended, output = self.cell().run(self._limits(deadline), job, most)
        self._check(ended)
        return ended, output

    def _limits(self, deadline: float) -> Limits:
        return Limits(max(0.001, deadline - time.monotonic()), self.memory_bytes)

    def _check(self, ended: ProgramEnd, *, is_over: bool = False) -> None:
        """Raise FaultError for what no solution does, TimeoutError for a program that did not end in time."""
        self.denied += ended.denied
        self.is_over_limit |= bool(ended.over)
        if is_over or not ended.in_time:
            raise TimeoutError("the program did not finish in time")
        if ended.broke:
            raise FaultError(f"the program {ended.broke}")


def read_verdict(frame: bytes) -> dict[str, Any]:
    """Return what the sandbox of the tests says; SandboxEndedError if it cannot be read."""
    try:
        told: Any = values.parse(frame[values.HEAD.size :])
        if isinstance(told, dict) and told.keys() == NO_VERDICT.keys():
            return told
        raise values.FrameError("not a verdict")
    except values.FrameError as error:
        raise SandboxEndedError(f"the tests' verdict cannot be read: {frame[:80]!r}") from error


def cases_of(answer: str) -> list[tuple[str, str]]:
    """Return the inputs and outputs of an answer; raise UnscoredError if there are none."""
    try:
        cases = [(str(case["input"]), str(case["output"])) for case in json.loads(answer)]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UnscoredError(f'the answer is not a JSON list of {{"input", "output"}}: {error}') from error
    if not cases:
        raise UnscoredError("the answer contains no test cases")
    return cases


def checked_tests(tests: str) -> int:
    """Return the number of assertions outside of functions; UnscoredError if tests cannot be run."""
    try:
        tree = parse(tests, "tests.py")
        compile(tree, "tests.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        why = str(error) or "nested too deeply"
        raise UnscoredError(f"the answer is not Python that can be run as tests: {why}") from error
    if not tests.strip():
        raise UnscoredError("the answer contains no tests")
    return sum(isinstance(node, ast.Assert) for node in tree.body)


def are_alike(output: str, wanted: str) -> bool:
    """Whether two outputs are the same, by line without trailing blanks.

    A list of its lines would take 30 times the memory of an output.
    """
    texts = (io.StringIO(text.strip(), newline=None) for text in (output, wanted))
    return all(
        one.rstrip() == other.rstrip() for one, other in itertools.zip_longest(*texts, fillvalue="\n?")
    )
