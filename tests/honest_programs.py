"""Ordinary programs with tests that plain Python accepts, in the styles of well-known benchmarks.

A file of `tests/data/honest_programs` holds entries: a line `=== name`, the program, `--- tests`, its tests,
and, where it is natural, `--- wrong` with `old ==> new`, which makes a wrong variant of the program.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "data" / "honest_programs"


@dataclass(frozen=True)
class Pair:
    """A program and its tests: assertions, or a list of cases for standard input."""

    name: str
    program: str
    tests: str
    wrong: str  # a variant of the program; empty: none

    @property
    def mode(self) -> str:
        return "stdio" if self.tests.lstrip().startswith("[{") else "asserts"


def read(path: Path) -> list[Pair]:
    """Return the pairs of a file."""
    return [_pair(entry) for entry in path.read_text(encoding="utf-8").split("=== ")[1:]]


def _pair(entry: str) -> Pair:
    head, _, change = entry.partition("\n--- wrong\n")
    head, _, tests = head.partition("\n--- tests\n")
    name, _, program = head.partition("\n")
    old, arrow, new = change.removesuffix("\n").partition(" ==> ")
    if arrow and old not in program:
        raise ValueError(f"{name}: no {old!r} in the program")
    return Pair(name, program, tests, program.replace(old, new) if arrow else "")


PAIRS = [pair for path in sorted(FOLDER.glob("*.txt")) for pair in read(path)]


def plain_script(program: str, tests: str) -> str:
    """Return a script that runs a program and its tests as plain Python does, in one namespace."""
    return (
        "import sys, types\n"
        "main = sys.modules['solution'] = types.ModuleType('solution')\n"
        f"exec(compile({program!r}, 'solution.py', 'exec'), main.__dict__)\n"
        "sys.modules['__main__'] = main\n"
        "main.__name__ = '__main__'\n"
        f"exec(compile({tests!r}, 'tests.py', 'exec'), main.__dict__)\n"
        "if 'unittest' in sys.modules:\n"  # as the runners of benchmarks do
        "    from unittest import TestResult, defaultTestLoader\n"
        "    assert defaultTestLoader.loadTestsFromModule(main).run(TestResult()).wasSuccessful()\n"
    )


def plain_python_accepts(program: str, tests: str) -> bool:
    """Whether an interpreter of its own runs tests to their end."""
    command = [sys.executable, "-c", plain_script(program, tests)]
    with tempfile.TemporaryDirectory() as folder:  # some write files
        ended = subprocess.run(command, capture_output=True, timeout=60, check=False, cwd=folder)
    return ended.returncode == 0


def plain_python_prints(program: str, cases: str) -> bool:
    """Whether a program prints, in an interpreter of its own, what all cases expect."""
    for case in json.loads(cases):
        ended = subprocess.run(
            [sys.executable, "-c", program],
            input=case["input"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if ended.returncode or ended.stdout.split() != case["output"].split():
            return False
    return True
