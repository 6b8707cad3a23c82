"""Runs one program against its tests, in a separate process that may be killed."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from retrain.rewards import UnscoredError
from retrain.rollouts import Prompt

HARNESS = Path(__file__).with_name("harness.py")
FENCED = re.compile(r"```(?:python|py|python3)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
PR_SET_CHILD_SUBREAPER = 36


def check(completion: str, prompt: Prompt, *, tests: str, timeout_s: float, memory_bytes: int) -> float:
    """Return 1 if the program in the completion passes all tests of the prompt's answer.

    Raises:
        TimeoutError: the tests together took longer than `timeout_s`.
        UnscoredError: the answer contains no tests.
    """
    program = program_of(completion)
    _adopt_orphans()
    deadline = time.monotonic() + timeout_s
    cases = _cases(prompt.answer) if tests == "stdio" else [(_compiled(prompt.answer), None)]
    return float(all(_passes(program, given, wanted, deadline, memory_bytes) for given, wanted in cases))


def program_of(completion: str) -> str:
    """Return the last fenced block of Python, or the whole text if there is none."""
    blocks = FENCED.findall(completion)
    return str(blocks[-1]) if blocks else completion


def _passes(program: str, given: str, wanted: str | None, deadline: float, memory_bytes: int) -> bool:
    """Run once, with input `given` and expected output `wanted`; if that is None, run the tests."""
    with tempfile.TemporaryDirectory(prefix="retrain-program-") as folder:
        directory = Path(folder)
        _write(directory / "solution.py", program)
        if wanted is None:
            _write(directory / "tests.py", given)
            _, verdict = _run(directory, "", deadline, memory_bytes)
            return verdict.startswith(b"passed")
        status, output = _run(directory, given, deadline, memory_bytes, to_output=True)
        return status == 0 and _lines(output.decode("utf-8", "replace")) == _lines(wanted)


def _run(
    directory: Path, given: str, deadline: float, memory_bytes: int, *, to_output: bool = False
) -> tuple[int, bytes]:
    """Run the harness; return its exit status and its verdict or standard output."""
    _write(directory / "input.txt", given)
    with (
        (directory / "input.txt").open("rb") as stdin,
        tempfile.TemporaryFile() as written,
    ):
        fd = written.fileno()
        left_s = max(0.0, deadline - time.monotonic())
        limits = (math.ceil(left_s), memory_bytes, os.getpid(), fd)
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-X", "utf8", str(HARNESS), *map(str, limits)],
            cwd=directory,
            stdin=stdin,
            stdout=written if to_output else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=() if to_output else (fd,),
            start_new_session=True,  # one group to kill, including the program's children
            env=_environment(directory),
        )
        try:
            status = process.wait(left_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError("the program did not finish in time") from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _end_children()
        written.seek(0)
        return status, written.read()


@cache
def _adopt_orphans() -> None:
    """Become the parent of orphaned descendants, such as those that left their group (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _end_children() -> None:
    """Kill the processes that a program left behind, and their descendants."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _children() -> list[int]:
    found: list[int] = []
    for file in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found.extend(map(int, file.read_text().split()))
    return found


def _environment(directory: Path) -> dict[str, str]:
    """Return an environment without keys and with the temporary folder as home."""
    path = os.environ.get("PATH", os.defpath)
    return {"PATH": path, "HOME": str(directory), "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}


def _cases(answer: str) -> list[tuple[str, str]]:
    try:
        cases = [(str(case["input"]), str(case["output"])) for case in json.loads(answer)]
    except (ValueError, TypeError, KeyError) as error:
        raise UnscoredError(f'the answer is not a JSON list of {{"input", "output"}}: {error}') from error
    if not cases:
        raise UnscoredError("the answer contains no test cases")
    return cases


def _compiled(tests: str) -> str:
    try:
        compile(tests, "tests.py", "exec")
    except (SyntaxError, ValueError) as error:
        raise UnscoredError(f"the answer is not Python that can be run as tests: {error}") from error
    if not tests.strip():
        raise UnscoredError("the answer contains no tests")
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
