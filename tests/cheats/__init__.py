"""Known ways to a reward without a solution: one file per family, and honest solutions beside them.

In a program, `@VICTIM@` is a process that it might end, `@MARKER@` a path that it might write to, `@TESTS@`
the file with the expected values, and `@PORT@` a server that tells them. All belong to the test, so that a
program that escapes does no harm.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

EXPECTED = {2: 7391, 3: 8402}
ANSWERS = {
    "asserts": f"wanted = {EXPECTED}\nassert f(2) == wanted[2]\nassert f(3) == wanted[3]",
    "stdio": json.dumps([{"input": "2\n", "output": f"{EXPECTED[2]}\n"}]),
}
ANSWERS["shared"] = ANSWERS["asserts"]


@dataclass(frozen=True)
class Cheat:
    """A program that has no solution."""

    name: str
    why: str  # it could earn a reward
    program: str
    mode: str = "asserts"  # or "stdio", or "shared": tests in the program's own interpreter
    answer: str = ""  # the tests; by default the mode's
    hangs: bool = False  # judged with a short limit

    @property
    def tests(self) -> str:
        return self.answer or ANSWERS[self.mode]


@dataclass(frozen=True)
class Honest:
    """A program that solves its task."""

    name: str
    program: str
    answer: str
    mode: str = "asserts"
