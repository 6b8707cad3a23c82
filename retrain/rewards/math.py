r"""Mathematical equality by math-verify: `\frac{1}{2}`, `0.5` and `1/2` are the same answer.

Every check runs in a killable process, with the same limits in any thread. A completion whose check hangs or
fails gets 0; if the reference answer is the cause, the completion is unscored.

Source: math-verify, which extracts answers with regular expressions and compares them with SymPy.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from retrain.extras import load
from retrain.registry import Megabytes, Positive, Workers
from retrain.rewards import Answer, BatchScorer, Outcome, Score, UnscoredError, score_with
from retrain.rewards.match import last_boxed
from retrain.rewards.pool import VerifierScorer
from retrain.rollouts import Prompt

EXTRA = "math"
PACKAGES = ("math_verify",)
RANGE = (0.0, 1.0)
SYMBOLS = "∞∅"  # that are answers
# a whole number in groups of three digits with spaces between them, which math-verify adds up
SPACED = re.compile(r"(?<![\d.,^_])\d{1,3}(?:(?:\\[,;: ]|~|\s)\d{3})+(?![\d/])")


def open_scorer(
    *, timeout_s: Positive = 5.0, workers: Workers = 0, memory_mb: Megabytes = 2048
) -> BatchScorer:
    r"""Score 1 if the last `\boxed{...}`, else the last expression in the completion, equals the answer.

    The answer is LaTeX, with or without `$` or `\boxed`, or a plain number or expression. If it cannot be
    parsed, completions are unscored.

    Args:
        timeout_s: limit of one check, from its start; a check usually takes some milliseconds.
        workers: number of checking processes; 0 is one per core.
        memory_mb: limit of a process's memory (Linux), since an expression can need any amount.
    """
    check, memory_bytes = f"{__name__}.open_check", memory_mb << 20
    return MathScorer(
        check, {}, workers=workers, timeout_s=timeout_s, memory_bytes=memory_bytes, is_factory=True
    )


score = score_with(open_scorer)


class MathScorer(VerifierScorer):
    """Scores with math-verify; after a check that failed, it checks the reference answer as well."""

    def __init__(self, *arguments: Any, **limits: Any) -> None:
        super().__init__(*arguments, **limits)
        self._readable: dict[str, bool] = {}

    def score_all(self, answers: Sequence[Answer]) -> list[Score]:
        scores = super().score_all(answers)
        hung: set[str] = set()  # references whose check did, perhaps only as the machine is busy
        return [self._judged(answer, score, hung) for answer, score in zip(answers, scores, strict=True)]

    def _judged(self, answer: Answer, score: Score, hung: set[str]) -> Score:
        """Return a score, without its value if the check failed and the reference may be the cause."""
        if score.value != 0 or score.outcome is Outcome.SCORED:
            return score
        wanted = answer.prompt.answer
        if wanted not in self._readable and wanted not in hung:
            pair = [Answer(wanted, answer.prompt), Answer("0", answer.prompt)]
            itself, number = super().score_all(pair)  # equal to itself, and comparable with a number
            if Outcome.TIMEOUT in (itself.outcome, number.outcome):
                hung.add(wanted)
            else:
                self._readable[wanted] = itself.value == 1 and number.outcome is Outcome.SCORED
        if self._readable.get(wanted):
            return score
        why = f"the reference answer may be the cause: {score.message}"
        return Score(None, score.outcome, why, is_unjudged=wanted not in hung)


def open_check() -> Callable[[str, Prompt], float]:
    """Load math-verify in a checking process; return the function that compares two answers."""
    # Its own time limits need SIGALRM and turn a timeout into "not equal"; the pool's limit is used instead.
    library = load("math_verify", "math", "math")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # hides the warning that its limits are off

    def parse(text: str) -> list[Any]:
        found: list[Any] = library.parse(text, parsing_timeout=None, raise_on_error=True)
        return found

    def check(completion: str, prompt: Prompt) -> float:
        wanted = parse(_marked(prompt.answer))
        if not _is_readable(prompt.answer, wanted):
            raise UnscoredError(f"the answer {prompt.answer[:80]!r} cannot be read as mathematics")
        boxed = last_boxed(completion)
        if completion == prompt.answer:
            given = wanted
        else:
            given = parse(completion if boxed is None else f"\\boxed{{{_joined(boxed)}}}")
        return float(library.verify(wanted, given, timeout_seconds=None, raise_on_error=True))

    return check


def _is_readable(answer: str, found: Sequence[Any]) -> bool:
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
        return f"\\boxed{{{_joined(boxed)}}}"
    is_marked = re.search(r"(?<!\\)\$|\\[(\[]", answer)  # `\$5` is a price
    return _joined(answer if is_marked else f"${answer}$")


def _joined(text: str) -> str:
    r"""Return an answer with its spaced numbers, such as `10\,080`, without their spaces."""
    return SPACED.sub(lambda found: re.sub(r"\D", "", found[0]), text)
