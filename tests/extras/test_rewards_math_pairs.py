"""Pairs of a reference and an answer, each with whether they are equal."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from retrain.base.rollouts import Prompt
from retrain.plugins.rewards.math import open_check

EQUAL = [
    ["1e-05", "0.00001", r"10^{-5}", r"\frac{1}{100000}", "1E-5"],
    ["1.5e3", "1500", "1500.0", "1.5E+3", r"1\,500", r"1.5\times 10^3"],
    ["1e6", "1000000", "10^6", "10**6", "1,000,000"],
    ["2.5e-1", "0.25", r"\frac14", "1/4", ".25", r"\frac{2}{8}"],
    ["1.5", "1 1/2", "3/2", r"\frac{3}{2}", r"\dfrac{3}{2}"],
    ["2 3/4", "2.75", "11/4", r"\frac{11}{4}"],
    [r"0.\overline{3}", "1/3", r"\frac{1}{3}", r"\frac13", r"0.3\overline{3}", r"0.\bar{3}"],
    [r"0.1\overline{6}", "1/6", r"\frac{1}{6}"],
    [r"2.\overline{09}", "23/11", r"\frac{23}{11}"],
    ["2**3", "8", "2^3", "8.0", r"\sqrt{64}"],
    ["2**10", "1024", "2^{10}", "4**5"],
    ["2**(-2)", "2**-2", "2^{-2}", "0.25"],
    ["pi", r"\pi"],
    ["2pi", r"2\pi", "2*pi", r"2 \pi"],
    [r"\frac{\pi}{4}", "pi/4", r"\pi/4"],
    [r"\varnothing", r"\emptyset", r"\{\}"],
    [r"[0,\infty)", r"x \ge 0", r"x \geq 0", "x >= 0", r"[0, \infty)"],
    [r"(-\infty,3]", r"x \le 3", "x<=3", r"(-\infty, 3]"],
    [r"(2,\infty)", "x > 2", r"x \gt 2"],
    [r"(-\infty,-1)", "x < -1", r"x \lt -1"],
    [r"\{1,2\}", "x=1,x=2", "x = 1 or x = 2", r"\{2,1\}"],
    [r"\sqrt{2}", "2^{1/2}", r"2^{\frac12}"],
    ["-0.5", "-1/2", r"-\frac{1}{2}", "-5e-1"],
    ["e^2", "e^{2}"],
    ["1e100", "1E+100", "10^{100}", "10**100"],
    [r"\sqrt{3}", "3**0.5", "3**(0.5)", r"3^{\frac{1}{2}}"],
    [r"0.\dot{7}", r"0.\overline{7}", "7/9"],
    ["[4,9)", r"4 \le x < 9", r"4 \leqslant x < 9"],
    ["(4,9)", "9 > x > 4"],
    [r"[5,\infty)", r"5 \le x", "x >= 5", r"x \geqslant 5"],
    [r"\{x: x\ge0\}", r"[0,\infty)", r"\{x \mid x \ge 0\}", r"\left\{x \in \mathbb{R} : x \geq 0\right\}"],
    [r"x \ne 0", r"x \neq 0", r"(-\infty,0)\cup(0,\infty)", r"\{x: x \ne 0\}"],
    ["0.(3)", "1/3", r"0.\overline{3}"],
    ["-1.2(6)", r"-\frac{19}{15}", r"-1.2\overline{6}"],
    ["x^2+1", "1+x^2", "x**2+1", "x^{2}+1"],
    [r"50\%", "50%", "50"],
    [r"\$18.90", "$18.90", "18.90"],
    [r"32,\!348", "32348", "32,348", r"\$32,\!348"],
    ["025", "25", "25.0", r"\text{25}", r"\boldsymbol{25}"],
    [r"90^\circ", "90^{\\circ}", "90°"],
    ["-1", "−1", "-1.0"],
    [r"4\frac{2}{3}", "14/3", r"\frac{14}{3}"],
    [r"3\sqrt{13}", r"\sqrt{117}", "3√13", "3√(13)"],
    [r"\left( 3, \frac{\pi}{2} \right)", "(3, pi/2)", r"(3,\pi/2)", "(3, π/2)"],
    ["(1,2)", "(1, 2)", r"\left(1,2\right)", "(1.0, 2.0)"],
    ["1,-2", "-2, 1", "1 and -2"],
    ["y=2x+3", "2x+3", "y = 3 + 2x"],
    ["p - q", "-q+p"],
    ["3+4i", "4i+3"],
    [r"\text{Evelyn}", "Evelyn"],
    [r"\text{(C)}", "C", "(C)", r"\textbf{(C)}"],
    ["120_8", "120_{8}"],
    [r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"],
    [r"x \in [2,5]", "[2,5]", "[2, 5]", r"2 \le x \le 5"],
    [r"(-\infty,2) \cup (3,\infty)", r"x<2 \text{ or } x>3", "x < 2 or x > 3", "(-∞,2)∪(3,∞)"],
]
DIFFERENT = [
    ("1e-05", "e-5"),
    ("e-5", "1e-05"),
    ("0.5", "0.5000001"),
    ("0.5000001", "0.5"),
    ("1e-12", "2e-12"),
    ("0", "1e-9"),
    ("(1,2)", "x=1,x=2"),
    ("x=1,x=2", "(1,2)"),
    (r"[0,\infty)", "x > 0"),
    (r"(0,\infty)", "x >= 0"),
    (r"[0,\infty)", r"x \le 0"),
    (r"[0,\infty)", "[0,1)"),
    ("1 1/2", "11/2"),
    (r"0.\overline{3}", "0.3"),
    ("2**3", "6"),
    ("2**3", "23"),
    ("pi", "3.14"),
    ("1.5e3", "1.5e2"),
    ("1/2", "0.5000001"),
    (r"\frac{1}{2}", "0.5000001"),
    ("0.5000001", r"\frac{1}{2}"),
    (r"\{1,2\}", "(1,2)"),
    ("(1,2)", r"\{1,2\}"),
    ("(1,2)", r"\left\{1,2\right\}"),
    ("[4,9)", r"4 < x \le 9"),
    (r"[5,\infty)", r"5 \ge x"),
    ("1e100", "1e99"),
    (r"\pi", "3.1415927"),
    ("3.1415927", r"\pi"),
    (r"\sqrt{2}", "1.4142136"),
    ("1.414214", r"\sqrt{2}"),
    ("1/3", "0.3333333"),
    ("0.(3)", "0.3333333"),
    (r"x \ne 0", r"y \ne 0"),
    (r"x \ne 0", r"x \ne 1"),
    (r"x \ne 0", r"x > 0"),
    (r"\{x: x\ge0\}", r"(0,\infty)"),
    (r"\{x: x\ge0\}", r"\{x: x\le0\}"),
    ("2", "(1, 2)"),
    ("9", "[4, 9)"),
    ("2", "1, 2"),
    ("1", "1 and 2"),
    ("5", "4 or 5"),
    ("2", "x=1, y=2"),
    ("3", "2x+3"),
    ("4", "3+4"),
    ("3", "x > 3"),
    ("13", "3√13"),
    (r"50\%", "5"),
    ("50", r"0.5\%"),
    ("1,000", "1"),
    ("120_8", "120_7"),
    ("[4,9)", "[4, 9]"),
    ("(1,2)", "(2, 1)"),
    ("(1,2)", "[1, 2]"),
    ("1, 2, 3", "1, 2"),
    (r"(-\infty,2) \cup (3,\infty)", "x<2 or x>4"),
    (r"x<2 \text{ or } x>3", "2<x<3"),
    ("(-∞,2)∪(3,∞)", "x < 2"),
    ("3+4i", "3-4i"),
    ("4 2/3", "8/3"),
    ("25", "52"),
]
FORMS = (r"so \boxed{@}", "The answer is $@$.", "@", "Answer: @", "So\n#### @")
PAIRS = [
    (a, b, 1.0)
    for forms in EQUAL
    for one, other in combinations(forms, 2)
    for a, b in ((one, other), (other, one))
]
# the first forms of neighbours, and those that mean something else
UNEQUAL = [(one[0], form, 0.0) for one, other in zip(EQUAL, EQUAL[2:], strict=False) for form in other]


@pytest.fixture(scope="module")
def check() -> Callable[[str, Prompt], float]:
    return open_check()


@pytest.mark.parametrize(
    ("reference", "answer", "value"), [*PAIRS, *UNEQUAL, *((one, other, 0.0) for one, other in DIFFERENT)]
)
def test_an_answer_equals_its_reference_or_not(
    check: Callable[[str, Prompt], float], reference: str, answer: str, value: float
) -> None:
    found = {form: check(form.replace("@", answer), Prompt(0, "?", reference)) for form in FORMS}
    assert found == dict.fromkeys(FORMS, value)


@pytest.mark.parametrize(
    ("completion", "reference"),
    [("Answer: 16 (4*4)", "16"), ("The answer is 5 (five apples).", "5"), ("Answer: 16 (x+1)", "16(x+1)")],
)
def test_a_number_may_have_a_note_in_parentheses(
    check: Callable[[str, Prompt], float], completion: str, reference: str
) -> None:
    assert check(completion, Prompt(0, "?", reference)) == 1


def test_the_table_holds_300_pairs() -> None:
    assert len(PAIRS) + len(UNEQUAL) + len(DIFFERENT) >= 300
