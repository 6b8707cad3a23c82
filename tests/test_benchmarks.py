"""Each script of `benchmarks/` explains itself, and the suite reads what the quickest of them print."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.areas import AREAS, STUDIES
from benchmarks.distill import carrying, short_sums, two_digits
from benchmarks.prompts import sums

ROOT = Path(__file__).parent.parent
QUICK = {
    "journal_overhead": "--steps 2 --step-ms 1",
    "numpy_backend": "--steps 1",
    "status_at_scale": "--runs 2 --rows 5 --repeats 1",
    "usl_intervals": "--sets 1",
}
SHOW_HELP = """
import contextlib, importlib, io, pathlib, sys

for script in sorted(pathlib.Path("benchmarks").rglob("*.py")):
    if "script_parser(__doc__)" not in script.read_text():
        continue
    try:
        module = importlib.import_module(".".join(script.with_suffix("").parts))
    except ModuleNotFoundError as error:
        assert not error.name.startswith(("benchmarks", "retrain", "tests")), error
        continue  # its extra is not installed
    sys.argv = [str(script), "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        module.main()
    assert shown.getvalue().startswith("usage: python -m benchmarks"), script
    assert module.__doc__.strip() in shown.getvalue(), script
    print(script.stem)
"""


def assert_explained(scripts: set[str]) -> None:
    done = subprocess.run([sys.executable, "-c", SHOW_HELP], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert scripts <= set(done.stdout.split())


def assert_readable(script: str, options: str) -> None:
    """Run a script, and draw from its JSON what the suite shows of it."""
    command = [sys.executable, "-m", f"benchmarks.{script}", *options.split(), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (area,) = (area for area in AREAS if area.module == script)
    assert list(area.lines(json.loads(done.stdout)))


def test_every_script_that_needs_no_extra_explains_itself() -> None:
    assert_explained({"__main__", "startup", *QUICK})


@pytest.mark.parametrize(("script", "options"), QUICK.items())
def test_the_suite_reads_what_a_quick_script_prints(script: str, options: str) -> None:
    assert_readable(script, options)


def test_each_study_is_listed_with_its_result() -> None:
    scripts = (ROOT / "benchmarks" / "studies").glob("*.py")
    assert {
        script.stem for script in scripts if "script_parser(__doc__)" in script.read_text()
    } == STUDIES.keys()


def test_the_language_model_s_sums_are_right_and_none_is_held_out_and_trained_on() -> None:
    task = sums(seed=3)
    questions = [prompt.text for prompt in (*task.train, *task.held_out)]
    assert len(set(questions)) == len(questions) == 300
    for prompt in (*task.train, *task.held_out):
        left, right = prompt.text.rstrip("=").split("+")
        assert int(left) + int(right) == int(prompt.answer[::-1])


def test_sums_with_a_teacher_are_right_and_none_is_held_out_and_trained_on() -> None:
    digits, words = two_digits(seed=3), short_sums(seed=3)
    for task in (digits, words):
        questions = [prompt.text for prompt in (*task.train, *task.held_out)]
        assert len(set(questions)) == len(questions)
    for prompt in (*digits.train, *digits.held_out):
        assert sum(map(int, re.findall(r"\d+", prompt.text))) == int(prompt.answer[::-1])
    for prompt in (*words.train, *words.held_out):
        assert sum(map(int, re.findall(r"\d+", prompt.text))) == int(prompt.answer)


def test_a_wrong_demonstration_forgets_to_carry_and_a_right_one_does_not() -> None:
    rng, wrong = random.Random(0), 0
    for number in range(400):
        left, right, answer = re.findall(r"\d+", carrying(rng, is_right=number < 200))
        is_sum = int(answer[::-1]) == int(left) + int(right)
        assert is_sum or number >= 200
        wrong += not is_sum
        columns = zip(left[::-1], right[::-1], answer, strict=False)
        assert is_sum or all(int(c) == (int(a) + int(b)) % 10 for a, b, c in columns)
    assert 80 < wrong < 140  # four of five of those that carry
