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
from itertools import pairwise
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
PURE = True
LONGEST_EXPONENT = 15  # that is written out
SPELLINGS = {
    r"\varnothing": r"\emptyset",
    r"\boldsymbol": r"\mathbf",
    "∅": r"\emptyset",
    "π": r"\pi ",
    "∞": r"\infty ",
    "°": r"^\circ",
    "−": "-",
    "∪": r"\cup ",
}
SYMBOLS = "∞∅"  # that are answers
NUMBER = re.compile(r"\s*[-+]?(?:\d+\.?\d*|\.\d+)\s*")
# a whole number in groups of three digits with spaces between them, which math-verify adds up
SPACED = re.compile(r"(?<![\d.,^_])\d{1,3}(?:(?:\\[,;: ]|~|\s)\d{3})+(?![\d/])")

POWER = re.compile(r"\*\*\s*(?:\((-?\d+(?:\.\d+)?)\)|(-?\d+(?:\.\d+)?))|\*\*")
EXPONENT = re.compile(r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([+-]?\d{1,3})(?!\w|\.\d)")  # as `str` writes floats
REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\(?:overline|bar|dot)\{(\d+)\}")
IN_PARENTHESES = re.compile(r"\A(\s*[-+]?\d*\.\d*)\((\d+)\)\s*\Z")  # a whole answer, such as 0.1(6)
MIXED = re.compile(r"(?<![\w.,/^_)}])(\d+) +(\d+)/(\d+)(?![\w.])")
PI = re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])")
LIST = re.compile(r"\s*([a-zA-Z])\s*=([^=,]+(?:(?:,|\bor\b|\band\b)\s*\1\s*=[^=,]+)+)")
BETWEEN = r"(?:,|\bor\b|\band\b)\s*{}\s*="
TUPLE = re.compile(r"(?:\\left)?\(.+,.+\)")
INTERVAL = re.compile(r"[\[(][^,]+,[^,]+[\])](?:\s*\\cup\s*[\[(][^,]+,[^,]+[\])])*")
SET = re.compile(r"(?:\\left)?\\\{.+,.+\}")
VARIABLE = re.compile("[a-zA-Z]")
SET_BUILDER = re.compile(
    r"\s*(?:\\left)?\\\{\s*([a-zA-Z])(?:\s*\\in\s*\\mathbb\s*\{?R\}?)?\s*"
    r"(?::|\\colon|\\mid|\\vert|\||\\,?\|)\s*(.+?)(?:\\right)?\\\}\s*"
)
MEMBER = re.compile(r"\s*[a-zA-Z]\s*(?:\\in(?![a-zA-Z])|∈)\s*(?=(?:\\left)?[\[(])")
UNEQUAL = re.compile(r"\s*([a-zA-Z])\s*(?:\\neq?(?![a-zA-Z])|\\not\s*=|≠|!=)\s*([^,]+?)\s*")
MARKED = re.compile(r"\$+([^$]*)\$+")
ENVIRONMENT = re.compile(
    r"(?<!\\)\$\$((?:[^$]|\\\$)+?)(?<!\\)\$\$|(?<!\\)\\\[(.+?)(?<!\\)\\\]"
    r"|(?<![\\\d$])\$((?:\\\$|[^\n$])+?)(?<!\\)\$|(?<!\\)\\\(([^\n]+?)(?<!\\)\\\)",
    re.DOTALL,
)
CONNECTED = re.compile(r"\s*(?:,?\s*and|,?\s*or|,)\s*")  # between formulas that are one answer
PERCENT = re.compile(r"\s*(?:\\?%|[Pp]er ?cent|[Pp]ct)")
ANCHORS = re.compile(r"final answer", re.IGNORECASE), re.compile(r"answer", re.IGNORECASE)
LAST_LINE = re.compile(r"^####(?!\s*\d+\.\s)(?=.*\s*\Z)", re.MULTILINE)  # as GSM8K marks answers
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
REACH = 50  # characters between the word `answer` and the answer
ANSWER_IS = re.compile(rf"[^\d\n]{{0,{REACH}}}?(?:\bis\b|:|=)[\s:*]*")
WORDLESS = re.compile(
    r"(?:\\(?:text|mbox|math|begin|end)[a-z]*\s*\{[^{}\n]*\}|\\[a-zA-Z]+|\\[^a-zA-Z]|[^a-zA-Z\n$\\]"
    r"|(?<![a-zA-Z])(?:pi|sqrt|or|and|[a-zA-Z])(?![a-zA-Z]))+"
)
WITH_UNIT = re.compile(  # or with a note: `16 (4*4)`, but not `16 (x+1)`, which is a product
    r"([^a-zA-Z()]*\d) +(?:[a-zA-Z]{2,}[a-zA-Z -]*|[a-zA-Z]/[a-zA-Z]"
    r"|\((?!(?:[^a-zA-Z)]*[a-zA-Z](?![a-zA-Z]))).*\))"
)
NAME = re.compile(r"[a-zA-Z][a-zA-Z -]*")
ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))")
BASE = re.compile(r"\s*\w+_\{?(\d+)\}?\s*")
OR = re.compile(r"\s*(?:\\text\s*\{\s*or\s*\}|\bor\b)\s*")
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
        reference = answer.prompt.answer
        if reference not in self._readable and reference not in hung:
            pair = [Answer(reference, answer.prompt), Answer("0", answer.prompt)]
            itself, number = super().score_all(pair)  # equal to itself, and comparable with a number
            if Outcome.TIMEOUT in (itself.outcome, number.outcome):
                hung.add(reference)
            else:
                self._readable[reference] = itself.value == 1 and number.outcome is Outcome.SCORED
        if self._readable.get(reference):
            return score
        why = f"the reference answer may be the cause: {score.message}"
        return Score(None, score.outcome, why, is_unjudged=reference not in hung)


def open_check() -> Callable[[str, Prompt], float]:
    """Load math-verify in a checking process; return the function that compares two answers."""
    # Its own time limits need SIGALRM and turn a timeout into "not equal"; the pool's limit is used instead.
    library = load("math_verify", "math", "math")
    rational = load("sympy", "math", "math").Rational
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # hides the warning that its limits are off

    def parse(text: str) -> list[Any]:
        found: list[Any] = library.parse(text, parsing_timeout=None, raise_on_error=True)
        return found

    def equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
        return bool(library.verify(one, other, timeout_seconds=None, raise_on_error=True))

    def check(completion: str, prompt: Prompt) -> float:
        reference_values = parse(_marked(prompt.answer))
        if not _is_readable(prompt.answer, reference_values):
            raise UnscoredError(f"the answer {prompt.answer[:80]!r} cannot be read as mathematics")
        if completion == prompt.answer:
            return float(equal(reference_values, reference_values))
        reference, box = _joined(_bare(prompt.answer)), last_boxed(completion)
        if box is None:
            completion = (TAGGED.findall(completion) or [completion])[-1]
            box = _unboxed(completion)
        if box is None:
            answer_values = parse(EXPONENT.sub(_decimal, completion))
            answer = str(answer_values[-1]) if answer_values else ""
        else:
            answer = _joined(box)
            if _are_of_two_kinds(_bare(prompt.answer), box):
                return 0.0
            if INTERVAL.fullmatch(reference):
                answer = _interval(answer)
            elif INTERVAL.fullmatch(answer.strip()):
                reference_values = parse(f"${_interval(reference)}$")
            answer_values = parse(f"\\boxed{{{answer}}}")
        # math-verify rounds a decimal, and what it is compared with, to six digits; as fractions, neither
        pairs = ((reference, reference_values), (answer, answer_values))
        reference_values, answer_values = (
            [rational(Fraction(text.strip()))] if NUMBER.fullmatch(text) else values for text, values in pairs
        )
        return float(equal(reference_values, answer_values))

    # SymPy imports parts of itself when they are first used, which no check's time limit is to pay for.
    check("$x^2 + 1$", Prompt(0, "", "1"))
    return check


def _unboxed(completion: str) -> str | None:
    """Return the formula or the bare expression that is a completion's answer, as math-verify chooses it.

    None where the answer is more than one formula, or stands among words: math-verify reads those.
    """
    completion = LAST_LINE.sub("answer:", completion)
    tail, is_anchored = completion, False
    for anchor in ANCHORS:
        if not is_anchored and (places := list(anchor.finditer(completion))):
            tail, is_anchored = completion[places[-1].end() :], True
    formulas = list(ENVIRONMENT.finditer(tail))
    if not formulas:
        if is_anchored:
            start = ANSWER_IS.match(tail)
            if start is None:
                return None
            text = re.split(r"[.!]?(?:\n|\Z)|[.!]\s", tail[start.end() :])[0]
        else:
            text = tail.strip().rpartition("\n")[2].rstrip(".!")
        text = text.strip(" *`")
        text = re.sub(r"\A\([a-e]\) ", "", text)  # of a problem's parts
        if is_anchored and (number := WITH_UNIT.fullmatch(text)):
            return number[1]
        is_whole = is_anchored or text == completion.strip()
        return text if WORDLESS.fullmatch(text) or (is_whole and NAME.fullmatch(text)) else None
    is_near, before = is_anchored and formulas[0].start() <= REACH, tail[: formulas[0].start()]
    if is_near and len(formulas) > 1 and not ANSWER_IS.match(before) and re.search(r"[a-zA-Z]", before):
        return None
    place = 0 if is_near else len(formulas) - 1
    formula, after = formulas[place], tail[formulas[place].end() :]
    neighbours = [
        tail[one.end() : other.start()] for one, other in pairwise(formulas) if formula in (one, other)
    ]
    is_last = place < len(formulas) - 1 or not re.search(r"\d", after)  # a number after it is the answer
    if PERCENT.match(after) or not is_last or any(map(CONNECTED.fullmatch, neighbours)):
        return None
    content = next(text for text in formula.groups() if text).strip().rstrip(" .,;")
    return content if last_boxed(f"\\boxed{{{content}}}") == content else None


def _are_of_two_kinds(reference: str, answer: str) -> bool:
    """Whether two texts look alike to math-verify: a set and a point, or bounds of two variables."""
    for text, other in ((answer, reference), (reference, answer)):
        if (LIST.fullmatch(text) or SET.fullmatch(text.strip())) and TUPLE.fullmatch(other.strip()):
            return True
    return any(
        (right := pattern.fullmatch(reference)) is not None
        and (match := pattern.fullmatch(answer)) is not None
        and right[1] != match[1]
        for pattern in (UNEQUAL, BASE)
    )


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
    if last_boxed(answer) is not None:
        return f"\\boxed{{{_joined(_bare(answer))}}}"
    bare = _bare(answer)
    if re.search(r"(?<!\\)\$|\\[(\[]", bare):  # marked in a text; `\$5` is a price
        return _joined(answer)
    return f"${_joined(bare)}$"


def _bare(answer: str) -> str:
    """Return what an answer's box or dollar signs hold."""
    box = last_boxed(answer)
    text = (answer if box is None else box).strip()
    marked = MARKED.fullmatch(text)
    return marked[1].strip() if marked else text


def _interval(text: str) -> str:
    r"""Return bounds of one variable, such as `x \ge 0` or `1 < x < 3`, as the interval that they are."""
    if len(bounds := OR.split(text.strip())) > 1:
        intervals = [_interval(bound) for bound in bounds]
        return "\\cup".join(intervals) if all(map(INTERVAL.fullmatch, intervals)) else text
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
    for written, meant in SPELLINGS.items():
        text = text.replace(written, meant)
    text = ROOT.sub(r"\\sqrt{\1\2}", text)
    text = SPACED.sub(lambda match: re.sub(r"\D", "", match[0]), text)
    text = EXPONENT.sub(_decimal, text)
    text = POWER.sub(lambda power: f"^{{{Fraction(power[1] or power[2])}}}" if power.lastindex else "^", text)
    text = IN_PARENTHESES.sub(r"\1\\overline{\2}", text)
    text = REPEATING.sub(_fraction, text)
    text = MIXED.sub(r"(\1+\\frac{\2}{\3})", text)
    text = PI.sub(r"\\pi", text)
    text = text[match.end() :] if (match := MEMBER.match(text)) else text
    if builder := SET_BUILDER.fullmatch(text):
        interval = _interval(_joined(builder[2]))
        text = interval if INTERVAL.fullmatch(interval) else text
    if excluded := UNEQUAL.fullmatch(text):
        return f"(-\\infty,{excluded[2]})\\cup({excluded[2]},\\infty)"
    if equations := LIST.fullmatch(text):
        values = ",".join(re.split(BETWEEN.format(equations[1]), equations[2]))
        return f"\\{{{values}\\}}"
    return text


def _decimal(match: re.Match[str]) -> str:
    if abs(int(match[2])) > LONGEST_EXPONENT:
        return f"{match[1]}\\times10^{{{int(match[2])}}}"
    return f"{Decimal(match[0]):f}"


def _fraction(match: re.Match[str]) -> str:
    whole, first, repeated = match[1] or "0", match[2], match[3]
    scale = 10 ** len(first)
    value = Fraction(int(whole + first), scale) + Fraction(int(repeated), scale * (10 ** len(repeated) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
