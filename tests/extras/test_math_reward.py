"""The `math` reward with the real math-verify: equal is equal, and what hangs is counted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from retrain.base.rollouts import Group, Prompt, Rollout
from retrain.plugins.rewards import Answer, BatchScorer, Outcome, Score, math
from retrain.trainer.scoring import Scorer
from tests.cheats.boxes import HEDGES, Hedge

pytestmark = pytest.mark.extras


@pytest.fixture(scope="module")
def checker() -> Iterator[BatchScorer]:
    scorer = math.open_scorer(timeout_s=20.0, workers=1)
    yield scorer
    scorer.close()


def score(scorer: BatchScorer, completion: str, answer: str) -> Score:
    found = scorer.score_all([Answer(completion, Prompt(0, "?", answer))])
    assert isinstance(found, list)
    return found[0]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5"),
        ("the answer is 0.5", r"\frac12"),
        (r"$x = 3$ no, \boxed{4}", "4"),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
        (r"\boxed{(x+1)^2}", "x^2+2x+1"),
        (r"\boxed{1{,}000}", "1000"),
        (r"\boxed{\{3, 1, 2\}}", r"$\{1, 2, 3\}$"),
        ("42", r"thus \boxed{42}"),
        (r"\boxed{10\,080}", "10080"),
        (r"\boxed{10,080}", r"10\,080"),
        ("\\boxed{-1~234\u202f567\\text{ m}}", r"-1\ 234\;567"),
        (r"\boxed{36}", r"\$36.00"),
        ("1e6", "1000000"),
        ("The final answer is $1e-05$. I hope it is correct.", "0.00001"),
        ("The answer is 1.5e3.", "1500"),
        ("Thus there are about 1e6.", "1000000"),
        ("The answer is pi", r"\pi"),
        ("so it takes\n1 1/2", "3/2"),
        (r"**Answer:** 0.\overline{3}", "1/3"),
        ("The answer is x = 1 or x = 2", r"\{1,2\}"),
        (r"so \[ x \ge 0. \]", r"[0,\infty)"),
        ("$x=3$, so 5", "5"),
        ("The answer is $5$, since $7=7$.", "5"),
        ("The answer lies in $[0,10]$; it is $5$.", "5"),
        ("$1$ and $2$", r"\{1,2\}"),
        ("$x = 3$, and then $1e3$ follows", "1000"),
        ("The answer is $50$%.", r"50\%"),
        ("<think>Perhaps 3</think>\n<answer>42</answer>", "42"),
        ("<answer>(1, 2)</answer>", "(1,2)"),
        ("The answer is 1 1/2 hours.", "3/2"),
        ("The answer is 18 eggs", "18"),
        ("The answer is 5 m/s.", "5"),
        ("Answer: `7`", "7"),
        ("The answer is 5!", "5"),
        ("The answer is yes.", r"\text{Yes}"),
        ("### Sum\n#### 2. We get 7", "7"),
        ("Three.\n(a) 5", "5"),
    ],
)
def test_what_is_mathematically_equal_gets_1(checker: BatchScorer, completion: str, answer: str) -> None:
    assert score(checker, completion, answer) == Score(1.0)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{\frac{1}{3}}", "0.5"),
        ("", "4"),
        ("no idea", "4"),
        (r"4, or rather \boxed{5}", "4"),
        (r"\boxed{90}", r"10\,080"),  # no mixed number
        ("The answer is $x=1,x=2$", "(1,2)"),
        ("x=1,x=2", "(1,2)"),
        ("3 4", "12"),
        ("<think>Perhaps 3</think>\n<answer>42</answer>", "3"),
        ("The answer is 1 1/2 hours.", "1"),
        ("### Sum\n#### 2. We get 7", "2"),
        ("The answer is: 4 or 5", "4"),
    ],
)
def test_a_wrong_answer_is_no_error(checker: BatchScorer, completion: str, answer: str) -> None:
    assert score(checker, completion, answer) == Score(0.0)


def test_an_answer_that_cannot_be_read_leaves_the_completion_unscored(checker: BatchScorer) -> None:
    found = score(checker, "4", "")
    assert (found.value, found.outcome) == (None, Outcome.ERROR)


IMPORTS_BY_CHECKS = """
import sys
from retrain.base.rollouts import Prompt
from retrain.plugins.rewards.math import open_check
check = open_check()
before = set(sys.modules)
for completion in ("4", r"so it is \\boxed{\\frac{1}{2}}", r"\\boxed{x^2 + 1}"):
    check(completion, Prompt(0, "?", "4"))
print(sorted(set(sys.modules) - before))
"""


def test_the_time_limit_of_a_check_pays_for_no_import() -> None:
    command = [sys.executable, "-c", IMPORTS_BY_CHECKS]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_what_hangs_is_a_counted_timeout_and_all_else_is_scored_in_any_thread() -> None:
    hanging = r"\boxed{9^{9^{9^{9}}}}"
    right = [("4", "4"), (r"\boxed{4}", "4")]
    wrong = [("5", "4"), (hanging, "4"), (r"\boxed{10!!!!!!!}", "4")]
    without_score = [("4", hanging), ("4", "1/0"), ("4", "")]  # for the reference is to blame
    groups = []
    for given, wanted in [*right, *wrong, *without_score]:
        prompt = Prompt(0, "?", wanted)
        groups.append(Group(prompt, (Rollout(prompt, given, (), None, (), truncated=False),)))
    scorer = Scorer("math", {"timeout_s": 1.5, "workers": 2})
    try:
        with ThreadPoolExecutor(1) as threads:
            batch = threads.submit(scorer.score, groups).result()
    finally:
        scorer.close()
    assert batch.rewards[:5, 0].tolist() == [1, 1, 0, 0, 0]
    assert batch.scored[:, 0].tolist() == [True] * 5 + [False] * 3
    assert (batch.timeouts, batch.errors) == (3, 2)


@pytest.mark.parametrize(
    "reference",
    ["Monday", "(A)", r"\text{no}", "yes", "да", "答案", r"\emptyset", r"\pi", r"\infty", "∞", r"\{\}"],
)
def test_a_reference_of_words_or_symbols_is_right_only_for_itself(
    checker: BatchScorer, reference: str
) -> None:
    assert score(checker, rf"It is \boxed{{{reference}}}", reference) == Score(1.0)
    assert score(checker, r"It is \boxed{7}", reference) == Score(0.0)


@pytest.mark.parametrize(
    "reference",
    ["1/0", "$$", r"\frac{0}{0}", "?", "？", "x = ?", r"\text{?}", "...", "-", r"\frac{}{}", "()"],
)
def test_a_reference_that_cannot_be_checked_leaves_every_completion_unscored(
    checker: BatchScorer, reference: str
) -> None:
    assert {score(checker, completion, reference).value for completion in ("7", "8", r"\boxed{9}")} == {None}


@pytest.mark.parametrize("hedge", HEDGES, ids=lambda hedge: hedge.name)
def test_two_answers_are_right_for_at_most_one_question(checker: BatchScorer, hedge: Hedge) -> None:
    found = [score(checker, hedge.of("7391", "8402"), wanted).value for wanted in ("7391", "8402")]
    assert found in ([0.0, 0.0], [0.0, 1.0], [1.0, 0.0])
