"""Compares two mathematical answers with math-verify, in a separate process that may be killed."""

from __future__ import annotations

import logging
import re
import unicodedata
from typing import Any

from retrain.extras import load
from retrain.rewards import UnscoredError
from retrain.rewards.boxed import last_boxed
from retrain.rollouts import Prompt

# Its own time limits need SIGALRM and turn a timeout into "not equal"; the pool's limit is used instead.
_math_verify = load("math_verify", "math", "math")
SYMBOLS = "∞∅"  # that are answers
logging.getLogger("math_verify").setLevel(logging.ERROR)  # hides the warning that its time limits are off


def check(completion: str, prompt: Prompt) -> float:
    """Return 1 if the completion's final answer is mathematically equal to the prompt's.

    Raises:
        UnscoredError: the prompt's answer cannot be parsed.
    """
    wanted = _parse(_marked(prompt.answer))
    if not _is_readable(prompt.answer, wanted):
        raise UnscoredError(f"the answer {prompt.answer[:80]!r} cannot be read as mathematics")
    boxed = last_boxed(completion)
    if completion == prompt.answer:
        return float(_math_verify.verify(wanted, wanted, timeout_seconds=None, raise_on_error=True))
    given = _parse(completion if boxed is None else f"\\boxed{{{boxed}}}")
    return float(_math_verify.verify(wanted, given, timeout_seconds=None, raise_on_error=True))


def _is_readable(answer: str, found: list[Any]) -> bool:
    """Whether an answer is an expression, or words such as `Monday` or `(A)`; `?` stands for none."""
    text = unicodedata.normalize("NFKC", answer)  # a wide question mark is one
    if not found or "?" in text:
        return False
    words = re.sub(r"\\[a-zA-Z]+", "", text)  # without LaTeX's commands
    is_word = any(one.isalnum() or one in SYMBOLS for one in words)
    return is_word or type(found[0]).__name__ not in ("str", "Symbol")


def _marked(answer: str) -> str:
    """Return a bare answer in dollar signs, because LaTeX is only parsed there."""
    boxed = last_boxed(answer)
    if boxed is not None:
        return f"\\boxed{{{boxed}}}"
    return answer if "$" in answer or "\\(" in answer or "\\[" in answer else f"${answer}$"


def _parse(text: str) -> list[Any]:
    found: list[Any] = _math_verify.parse(text, parsing_timeout=None, raise_on_error=True)
    return found
