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
from decimal import Decimal
from fractions import Fraction
from typing import Any

from retrain.base.extras import load
from retrain.base.registry import Megabytes, Positive, Workers
from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import Answer, BatchScorer, Outcome, Score, UnscoredError, score_with
from retrain.plugins.rewards.match import last_boxed
from retrain.plugins.rewards.pool import VerifierScorer

EXTRA = "math"
PACKAGES = ("math_verify",)
RANGE = (0.0, 1.0)
LONGEST_EXPONENT = 15  # that is written out
SYMBOLS = "∞∅"  # that are answers
NUMBER = re.compile(r"\s*[-+]?(?:\d+\.?\d*|\.\d+)\s*")
# a whole number in groups of three digits with spaces between them, which math-verify adds up
SPACED = re.compile(r"(?<![\d.,^_])\d{1,3}(?:(?:\\[,;: ]|~|\s)\d{3})+(?![\d/])")

POWER = re.compile(r"\*\*\s*(?:\((-?\d+(?:\.\d+)?)\)|(-?\d+(?:\.\d+)?))|\*\*")
EXPONENT = re.compile(r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,3})(?![\w.])")  # as `str` writes floats
REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d+)\}")
MIXED = re.compile(r"(?<![\w.,/^_)}])(\d+) +(\d+)/(\d+)(?![\w.])")
PI = re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])")
LIST = re.compile(r"\s*([a-zA-Z])\s*=([^=,]+(?:(?:,|\bor\b|\band\b)\s*\1\s*=[^=,]+)+)")
BETWEEN = r"(?:,|\bor\b|\band\b)\s*{}\s*="
TUPLE = re.compile(r"(?:\\left)?\(.+,.+\)")
INTERVAL = re.compile(r"[\[(][^,]+,[^,]+[\])]")
SET = re.compile(r"(?:\\left)?\\\{.+,.+\}")
VARIABLE = re.compile("[a-zA-Z]")
SIGN = re.compile(r"\s*(\\[gl]eq?(?:slant)?(?![a-zA-Z])|\\[gl]t(?![a-zA-Z])|[<>]=?|[≤≥])\s*")


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
            return float(library.verify(wanted, wanted, timeout_seconds=None, raise_on_error=True))
        reference = _bare(prompt.answer)
        if boxed is None:
            given = parse(completion)
        else:
            if INTERVAL.fullmatch(reference):
                boxed = _interval(boxed)
            elif INTERVAL.fullmatch(boxed.strip()):
                wanted = parse(f"${_interval(reference)}$")
            given = parse(f"\\boxed{{{_joined(boxed)}}}")
        for one, other in ((boxed or "", reference), (reference, boxed or "")):
            if (LIST.fullmatch(one) or SET.fullmatch(one.strip())) and TUPLE.fullmatch(other.strip()):
                return 0.0  # values of one variable, or a set of them, are no point
        # its own text of 0.5 is \frac{1}{2}, so a box is read as it stands
        texts = [_joined(reference), _joined(boxed) if boxed is not None else str(given[-1] if given else "")]
        numbers = [_exact(*pair) for pair in zip(texts, (wanted, given), strict=True)]
        if None not in numbers and any(map(NUMBER.fullmatch, texts)):
            return float(numbers[0] == numbers[1])  # math-verify rounds to six digits
        return float(library.verify(wanted, given, timeout_seconds=None, raise_on_error=True))

    return check


def _exact(text: str, found: Sequence[Any]) -> Fraction | None:
    """Return the value of an answer that some decimal is equal to; None of any other, such as 1/3."""
    if NUMBER.fullmatch(text):
        return Fraction(text.strip())
    if not found or type(found[0]).__name__ not in ("Half", "Rational"):
        return None
    value = Fraction(int(found[0].p), int(found[0].q))
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return value if rest == 1 else None


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


def _bare(answer: str) -> str:
    """Return what an answer's box or dollar signs hold."""
    boxed = last_boxed(answer)
    return (answer if boxed is None else boxed).strip().strip("$").strip()


def _interval(text: str) -> str:
    r"""Return bounds of one variable, such as `x \ge 0` or `1 < x < 3`, as the interval that they are."""
    parts = SIGN.split(text.strip())
    values, signs = parts[::2], parts[1::2]
    are_less = [sign.lstrip("\\")[0] in "l<≤" for sign in signs]
    if len(values) not in (2, 3) or len(set(are_less)) > 1:
        return text
    variable = 1 if len(values) == 3 or VARIABLE.fullmatch(values[1]) else 0  # its place
    if not VARIABLE.fullmatch(values[variable]):
        return text
    low, high = "(-\\infty", "\\infty)"
    for place, (sign, is_less) in enumerate(zip(signs, are_less, strict=True)):
        is_closed = any(mark in sign for mark in "e=≤≥")
        is_before = place < variable
        value = values[place if is_before else place + 1]
        if is_less == is_before:
            low = f"{'[' if is_closed else '('}{value}"
        else:
            high = f"{value}{']' if is_closed else ')'}"
    return f"{low},{high}"


def _joined(text: str) -> str:
    r"""Return an answer such as `10\,080`, `1e-05`, `2**3` or `x=1,x=2` as math-verify reads it."""
    text = SPACED.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    text = EXPONENT.sub(_decimal, text)
    text = POWER.sub(_power, text)
    text = REPEATING.sub(_fraction, text)
    text = MIXED.sub(r"(\1+\\frac{\2}{\3})", text)
    text = PI.sub(r"\\pi", text).replace(r"\varnothing", r"\emptyset")
    if found := LIST.fullmatch(text):
        values = ",".join(re.split(BETWEEN.format(found[1]), found[2]))
        return f"\\{{{values}\\}}"
    return text


def _decimal(found: re.Match[str]) -> str:
    if abs(int(found[2])) > LONGEST_EXPONENT:
        return f"{found[1]}\\times10^{{{int(found[2])}}}"
    return f"{Decimal(found[0]):f}"


def _power(found: re.Match[str]) -> str:
    exponent = found[1] or found[2]
    return f"^{{{Fraction(exponent)}}}" if exponent else "^"


def _fraction(found: re.Match[str]) -> str:
    whole, first, repeated = found[1] or "0", found[2], found[3]
    scale = 10 ** len(first)
    value = Fraction(int(whole + first), scale) + Fraction(int(repeated), scale * (10 ** len(repeated) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
