"""Scores programs: they run in a sandbox, and what they print or return is compared here."""

from __future__ import annotations

import ast
import io
import itertools
import json
import queue
import re
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import Any

from retrain.rewards import Answer, Outcome, Score, UnscoredError
from retrain.rewards.threads import ThreadedScorer
from retrain.sandbox import Limits, ProgramEnd, Sandbox, SandboxEndedError, SandboxError, choose
from retrain.sandbox.cell import Cell
from retrain.sandbox.inside import values

FENCED = re.compile(r"```(?:python|py|python3)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
VERDICT_BYTES = 1 << 16
NO_VERDICT = {"passed": False, "garbage": "", "used": False, "needs_sharing": False}


class FaultError(Exception):
    """A program did what no solution does; the message says what."""


@dataclass(slots=True)
class ProgramRunner:
    """Where one program at a time is scored: its sandbox, open from the first program on."""

    sandbox: Sandbox
    cells: dict[str, Cell] = field(default_factory=dict)
    is_closed: bool = False
    denied: int = 0  # calls and paths that the program was denied
    is_over_limit: bool = False

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

    def close(self) -> None:
        while self.cells:
            self.cells.popitem()[1].close()


class ProgramScorer(ThreadedScorer):
    """Scores several programs at a time; a program that hangs or misbehaves gets 0."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        tests: str,
        timeout_s: float,
        workers: int,
        memory_bytes: int,
        shared: bool = False,
    ) -> None:
        """Start nothing yet; `workers` 0 is one per core."""
        super().__init__(workers, "programs")
        self.sandbox = sandbox.name
        self._shared = shared
        self._tests, self._timeout_s, self._memory_bytes = tests, timeout_s, memory_bytes
        self._runners = [ProgramRunner(sandbox) for _ in range(self.count)]
        self._free: queue.SimpleQueue[ProgramRunner] = queue.SimpleQueue()
        for runner in self._runners:
            self._free.put(runner)

    def close(self) -> None:
        """End all processes; safe to call twice."""
        super().close()
        for runner in self._runners:
            runner.is_closed = True
            runner.close()

    def score_one(self, answer: Answer) -> Score:
        runner = self._free.get()
        try:
            found = self._scored(runner, answer)
            return replace(found, is_over_limit=runner.is_over_limit)
        finally:
            self._free.put(runner)

    def _scored(self, runner: ProgramRunner, answer: Answer) -> Score:
        """Return the score of a completion; what its programs were denied and ran into is the runner's."""
        try:
            try:
                value = float(self._passes(runner, answer))
            except SandboxEndedError:  # once may be an accident
                runner.close()
                value = float(self._passes(runner, answer))
            if runner.denied:  # a sign, whose completion keeps its score
                return Score(value, Outcome.FAULT, runner.denial())
            return Score(value)
        except TimeoutError as error:
            if runner.denied:  # the graver sign
                return Score(0.0, Outcome.FAULT, f"{error}; {runner.denial()}")
            return Score(0.0, Outcome.TIMEOUT, str(error))
        except FaultError as error:
            return Score(0.0, Outcome.FAULT, str(error))
        except UnscoredError as error:
            return Score(None, Outcome.ERROR, str(error))
        except SandboxEndedError as error:
            runner.close()
            return Score(0.0, Outcome.FAULT, str(error))
        except (SandboxError, OSError) as error:  # no memory for another process, say
            runner.close()
            return Score(None, Outcome.ERROR, str(error))

    def _passes(self, runner: ProgramRunner, answer: Answer) -> bool:
        runner.denied, runner.is_over_limit = 0, False
        program, tests = program_of(answer.completion), answer.prompt.answer
        is_apart = self._tests == "asserts" and not self._shared
        for use in ("programs", "tests") if is_apart else ("programs",):
            runner.cell(use)  # opened before the time counts
        deadline = time.monotonic() + self._timeout_s
        if self._tests == "stdio":
            return all(
                self._prints(runner, program, given, wanted, deadline) for given, wanted in cases_of(tests)
            )
        assertions = checked_tests(tests)
        if self._shared:
            token = secrets.token_hex(16)
            job = {"job": "shared", "source": program, "tests": tests, "token": token}
            return self._run(runner, job, deadline, VERDICT_BYTES)[1] == values.frame([token, assertions])
        return self._reaches_end(runner, program, tests, deadline)

    def _prints(self, runner: ProgramRunner, program: str, given: str, wanted: str, deadline: float) -> bool:
        job = {"job": "stdio", "source": program, "input": given}
        ended, output = self._run(runner, job, deadline, values.LONGEST_FRAME)
        return ended.code == 0 and are_alike(output.decode("utf-8", "replace"), wanted)

    def _reaches_end(self, runner: ProgramRunner, program: str, tests: str, deadline: float) -> bool:
        """Run tests in one sandbox against a program in another."""
        limits = self._limits(deadline)
        answering = runner.cell().start(limits)
        try:
            job = {"job": "tests", "source": program, "tests": tests}
            judge = runner.cell("tests")
            testing = judge.start(limits, *[answering.fileno()] * 2)
            answering.close()
            verdict = testing.output(job, VERDICT_BYTES)
            is_over = not judge.ended(stop=verdict is None).in_time
        finally:
            answering.close()
            ended = runner.cell().ended(stop=True)
        self._check(runner, ended, is_over=is_over)
        told = read_verdict(verdict) if verdict else NO_VERDICT
        if not (told["passed"] or ended.is_known):
            raise SandboxEndedError("the sandbox has ended while tests used the program")
        if told["garbage"]:
            raise FaultError(f"the program's answer cannot be read: {told['garbage']}")
        if told["needs_sharing"]:
            raise UnscoredError("the tests subclass a class of the program, which needs shared = true")
        if told["passed"] and not told["used"]:
            raise UnscoredError("the tests pass without the program")
        return bool(told["passed"])

    def _run(
        self, runner: ProgramRunner, job: dict[str, str], deadline: float, most: int
    ) -> tuple[ProgramEnd, bytes]:
        """Run a program; return how it ended, and what it wrote.

        Raises:
            FaultError: it wrote too much, or did something forbidden.
            TimeoutError: it did not end in time.
        """
        ended, output = runner.cell().run(self._limits(deadline), job, most)
        self._check(runner, ended)
        if output is None:
            raise FaultError(f"the program wrote more than {most >> 10} KB")
        return ended, output

    def _limits(self, deadline: float) -> Limits:
        return Limits(max(0.001, deadline - time.monotonic()), self._memory_bytes)

    def _check(self, runner: ProgramRunner, ended: ProgramEnd, *, is_over: bool = False) -> None:
        """Raise what a program did beside its work.

        Raises:
            FaultError: it did something that no solution does.
            TimeoutError: it did not end in time.
        """
        runner.denied += ended.denied
        runner.is_over_limit |= bool(ended.over)
        if is_over or not ended.in_time:
            raise TimeoutError("the program did not finish in time")
        if ended.broke:
            raise FaultError(f"the program {ended.broke}")


def read_verdict(frame: bytes) -> dict[str, Any]:
    """Return what the sandbox of the tests says.

    Raises:
        SandboxEndedError: it cannot be read, so the sandbox is in a state that it should not be in.
    """
    try:
        told: Any = values.parse(frame[values.HEAD.size :])
        if isinstance(told, dict) and told.keys() == NO_VERDICT.keys():
            return told
        raise values.FrameError("not a verdict")
    except values.FrameError as error:
        raise SandboxEndedError(f"the tests' verdict cannot be read: {frame[:80]!r}") from error


def program_of(completion: str) -> str:
    """Return the last fenced block of Python, or the whole text if there is none."""
    blocks = FENCED.findall(completion)
    return str(blocks[-1]) if blocks else completion


def cases_of(answer: str) -> list[tuple[str, str]]:
    """Return the inputs and outputs of an answer; raise UnscoredError if there are none."""
    try:
        cases = [(str(case["input"]), str(case["output"])) for case in json.loads(answer)]
    except (ValueError, TypeError, KeyError) as error:
        raise UnscoredError(f'the answer is not a JSON list of {{"input", "output"}}: {error}') from error
    if not cases:
        raise UnscoredError("the answer contains no test cases")
    return cases


def checked_tests(tests: str) -> int:
    """Check that an answer is Python that can be run; return its number of assertions outside of functions.

    Raises:
        UnscoredError: it is not, or is empty.
    """
    try:
        tree = ast.parse(tests)
        compile(tree, "tests.py", "exec")
    except (SyntaxError, ValueError) as error:
        raise UnscoredError(f"the answer is not Python that can be run as tests: {error}") from error
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
