"""Reads a program from a completion, and tests from an answer."""

from __future__ import annotations

import ast
import io
import itertools
import json
import re

from retrain.rewards import UnscoredError

FENCED = re.compile(r"```(?:python|py|python3)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)


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
