"""Programs against tests: right, wrong, endless, greedy, and pretending."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.event_loop import result_of
from retrain.base.rollouts import Prompt
from retrain.config.load import parse
from retrain.plan.build import plan_runs
from retrain.plan.preflight import preflight, sandboxes_of
from retrain.plugins.rewards import Answer, BatchScorer, Outcome, Score, UnscoredError, python
from retrain.plugins.rewards.opening import open_reward
from retrain.plugins.rewards.python.scorer import are_alike

ASSERTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0"
CASES = json.dumps([{"input": "2 3\n", "output": "5\n"}, {"input": "10 20", "output": "30"}])
RIGHT = "def add(a, b): return a + b"
READS = "a, b = map(int, input().split())\nprint(a + b, end='  ')"


@pytest.fixture(scope="module")
def asserts() -> Iterator[BatchScorer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_KEY", "s3cret")
        scorer = python.open_scorer(timeout_s=5.0, workers=2, memory_mb=256)
        yield scorer
        scorer.close()


def score(scorer: BatchScorer, program: str, tests: str = ASSERTS) -> Score:
    found = scorer.score_all([Answer(program, Prompt(0, "add two numbers", tests))])
    assert isinstance(found, list)
    return found[0]


@pytest.mark.parametrize(
    "program",
    [
        RIGHT,
        f"Let me think.\n```python\n{RIGHT}\n```\nDone.",
        f"from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\n{RIGHT}",
        f"import os\nassert 'SECRET_KEY' not in os.environ\nopen('scratch', 'w').write('x')\n{RIGHT}",
    ],
)
def test_a_program_that_passes_every_test_gets_1(asserts: BatchScorer, program: str) -> None:
    assert score(asserts, program) == Score(1.0)


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b): return a - b",
        "def add(a, b) return a + b",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "",
    ],
)
def test_any_other_program_gets_0(asserts: BatchScorer, program: str) -> None:
    assert score(asserts, program) == Score(0.0)


def test_an_endless_program_is_a_timeout() -> None:
    scorer = python.open_scorer(timeout_s=0.3, workers=2)
    try:
        for program in ("while True: pass", "import time; time.sleep(1000)", "import signal; signal.pause()"):
            found = score(scorer, program)
            assert (found.value, found.outcome) == (0.0, Outcome.TIMEOUT)
    finally:
        scorer.close()


@pytest.mark.parametrize("tests", ["", "assert add(", "\0"])
def test_tests_that_cannot_run_leave_the_completion_unscored(asserts: BatchScorer, tests: str) -> None:
    found = score(asserts, RIGHT, tests)
    assert (found.value, found.outcome) == (None, Outcome.ERROR)


def test_cases_compare_what_is_printed() -> None:
    scorer = python.open_scorer(tests="stdio", workers=2)
    try:
        assert score(scorer, READS, CASES) == Score(1.0)
        assert score(scorer, "print(5)", CASES) == Score(0.0)
        assert (
            score(
                scorer, f"if __name__ == '__main__':\n    {READS.splitlines()[0]}; print(a + b)", CASES
            ).value
            == 1
        )
        assert score(scorer, READS, '{"input": 1}').outcome is Outcome.ERROR
    finally:
        scorer.close()


def test_an_output_that_is_too_long_to_read_is_unscored_where_the_tests_ask_for_it() -> None:
    program, wanted = "print('a' * 17_000_000)", "a" * 17_000_000
    with closing(python.open_scorer(tests="stdio", workers=1)) as scorer:
        right = score(scorer, program, json.dumps([{"input": "", "output": wanted}]))
        assert (right.value, right.outcome, right.is_unjudged) == (None, Outcome.ERROR, True)
        assert "16384 KB" in right.message
        assert score(scorer, "print(1)", json.dumps([{"input": "", "output": wanted}])) == Score(0.0)
        flood = score(scorer, program, '[{"input": "", "output": "a"}]')
        assert (flood.value, flood.outcome) == (0.0, Outcome.FAULT)


@pytest.mark.parametrize(
    ("ending", "value"),
    [
        ("import sys; sys.exit(0)", 1.0),
        ("exit()", 1.0),
        ("raise ValueError('afterwards')", 0.0),
        ("import sys; sys.exit(3)", 0.0),
        ("import os, sys, signal; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGSEGV)", 0.0),
    ],
)
def test_a_program_that_prints_the_answer_must_also_end_well(ending: str, value: float) -> None:
    scorer = python.open_scorer(tests="stdio", workers=1, memory_mb=256)
    try:
        assert score(scorer, f"{READS}\n{ending}", CASES) == Score(value)
        assert score(scorer, ending, '[{"input": "", "output": ""}]') == Score(value)
    finally:
        scorer.close()


LEAVES_A_CHILD = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: pass
    os._exit(0)
{RIGHT}
"""


def test_a_program_that_starts_processes_gets_0_and_leaves_none(asserts: BatchScorer) -> None:
    assert [score(asserts, RIGHT).value for _ in range(2)] == [1, 1]  # both sandboxes are open
    before = set(psutil.Process().children(recursive=True))
    assert score(asserts, LEAVES_A_CHILD).value == 0
    assert set(psutil.Process().children(recursive=True)) <= before


CHEATS = {
    "writes the verdict to every descriptor": """
import os
for fd in range(3, 64):
    try: os.write(fd, b"passed")
    except OSError: pass
""",
    "patches exec and compile": """
import builtins
builtins.exec = builtins.compile = lambda *args, **kwargs: None
""",
    "returns what is equal to everything": """
class Right:
    def __eq__(self, other): return True
def add(a, b): return Right()
""",
    "searches memory for the tests": """
import os, re
text = open(f"/proc/{os.getppid()}/maps").read()
found = 5
def add(a, b): return found if a == 2 else 0
""",
    "writes into the run's own pipes": """
import glob
for path in glob.glob("/proc/*/fd/*"):
    try: open(path, "wb", 0).write(b"passed 1000000\\n")
    except OSError: pass
""",
}


@pytest.mark.parametrize("sandbox", ["bubblewrap", "process"])
def test_a_program_that_only_pretends_gets_0(sandbox: str) -> None:
    scorer = python.open_scorer(timeout_s=5.0, workers=1, sandbox=sandbox)
    try:
        assert score(scorer, RIGHT) == Score(1.0)
        earned = {name: score(scorer, cheat).value for name, cheat in CHEATS.items()}
        assert earned == dict.fromkeys(CHEATS, 0)
    finally:
        scorer.close()


def test_tests_may_share_the_interpreter_of_the_program() -> None:
    scorer = python.open_scorer(shared=True, workers=1)
    tests = "class Sub(Base):\n    pass\nassert Sub().f() == 1\nassert Base.f"
    try:
        assert score(scorer, "class Base:\n    def f(self): return 1", tests) == Score(1.0)
        assert score(scorer, "class Base:\n    def f(self): return 2", tests) == Score(0.0)
        assert score(scorer, "import builtins\nbuiltins.exec = lambda *a: 0", tests) == Score(0.0)
    finally:
        scorer.close()


OWN_SANDBOX = {"sandbox": "process"}
PARTS = {"tests": {"reward": "python", "weight": 1.0}}
NO_SUCH = "'proces' is not a known sandbox; did you mean 'process'?"


@pytest.mark.parametrize(
    ("name", "params", "said"),
    [
        ("python", {"sandbox": "proces"}, f"[reward.params].sandbox: {NO_SUCH}"),
        ("weighted", {"parts": PARTS, "sandbox": "proces"}, f"[reward.params].sandbox: {NO_SUCH}"),
        (
            "weighted",
            {"parts": {"tests": {**PARTS["tests"], "params": {"sandbox": "proces"}}}},
            f"[reward.params.parts.tests.params].sandbox: {NO_SUCH}",
        ),
        (
            "python",
            {**OWN_SANDBOX, "sandbox_options": {"warm": False}},
            "[reward.params.sandbox_options].warm: unknown parameter of 'process'; it takes nothing",
        ),
        (
            "python",
            {**OWN_SANDBOX, "sandbox_options": 3},
            "[reward.params].sandbox_options: got 3; needs a table",
        ),
        (
            "python",
            {"sandbox_options": 0},
            "[reward.params].sandbox_options: got 0; needs a table",
        ),
    ],
)
def test_a_wrong_sandbox_of_a_rewards_own_is_told_with_the_file(
    name: str, params: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"reward": {"reward": name, "params": params}}, "c.toml")
    assert list(caught.value.problems) == [f"c.toml {said}"]


def test_options_of_its_own_are_checked_with_the_sandbox_that_it_shares() -> None:
    table = {"reward": "python", "sandbox": "process", "params": {"sandbox_options": {"warm": False}}}
    with pytest.raises(ConfigError, match=r"params\.sandbox_options\]\.warm: unknown parameter of 'process'"):
        preflight(plan_runs(parse({"reward": table}, "c.toml")), "c.toml")


def test_options_of_an_evaluations_reward_are_told_with_the_evaluation() -> None:
    asked = {
        "name": "hard",
        "task": "copy",
        "reward": "python",
        "params": {"sandbox_options": {"warm": False}},
    }
    raw = {"reward": {"reward": "match", "sandbox": "process"}, "eval": [asked]}
    with pytest.raises(ConfigError) as caught:
        preflight(plan_runs(parse(raw, "c.toml")), "c.toml")
    (problem,) = caught.value.problems
    assert problem.startswith('c.toml [[eval]] "hard" [params.sandbox_options].warm: unknown parameter')


@pytest.mark.parametrize(
    "own",
    [
        {"reward": "python", "params": OWN_SANDBOX},
        {"reward": "weighted", "params": {"parts": PARTS, **OWN_SANDBOX}},
        {"reward": "weighted", "params": {"parts": {"tests": {**PARTS["tests"], "params": OWN_SANDBOX}}}},
    ],
)
def test_a_reward_with_a_sandbox_of_its_own_has_its_own_options(own: dict[str, object]) -> None:
    shared = {"sandbox": "command", "sandbox_options": {"command": [sys.executable]}}
    config = parse({"reward": {**shared, **own}}, "c.toml")
    assert list(sandboxes_of([config])) == ["process"]
    opened = open_reward(config.reward.reward, config.reward.params, shared)
    opened.close()
    assert opened.sandbox == "process"  # type: ignore[attr-defined]


BY_PATH = {"path": "retrain.plugins.rewards.python.score", "params": {"tests": "stdio", "workers": 1}}
AS_PART = {"parts": {"custom": {"weight": 1.0, "params": BY_PATH}}}


@pytest.mark.parametrize(("name", "params"), [("custom", BY_PATH), ("weighted", AS_PART)])
@pytest.mark.parametrize("is_own", [False, True])
def test_a_reward_that_processes_call_runs_programs_in_the_chosen_sandbox(
    is_own: bool, name: str, params: dict[str, object], tmp_path: Path
) -> None:
    command = ["sh", "-c", f'touch "{tmp_path}/used"; exec "$@"', "sh"]
    chosen = {
        "sandbox": "command",
        "sandbox_options": {"command": command, "python": sys.executable},
    }
    if is_own and name == "weighted":
        params, given = {**params, **chosen}, {}
    elif is_own:
        params, given = {**params, "params": {**BY_PATH["params"], **chosen}}, {}  # type: ignore[dict-item]
    else:
        given = chosen
    config = parse({"reward": {"reward": name, "params": params, **given}}, "c.toml")
    assert list(sandboxes_of([config])) == ["command"]
    with closing(open_reward(name, params, given)) as scorer:
        (found,) = result_of(scorer.score_all([Answer(READS, Prompt(0, "add", CASES))]))
    assert replace(found, parts={}) == Score(1.0)
    assert (tmp_path / "used").exists()


def test_a_function_with_a_sandbox_of_its_own_keeps_it() -> None:
    params = {"path": "tests.reward_functions.in_a_sandbox_of_its_own", "workers": 1}
    config = parse({"reward": {"reward": "custom", "params": params}}, "c.toml")
    assert list(sandboxes_of([config])) == []
    given = {"sandbox": "auto", "sandbox_options": {}}
    with closing(open_reward("custom", params, given)) as scorer:
        (found,) = result_of(scorer.score_all([Answer("", Prompt(0, "", ""))]))
    assert found == Score(1.0)


def test_a_function_in_processes_is_imported_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_to_import.py").write_text("def score(completion, prompt): return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with closing(
        open_reward("custom", {"path": "slow_to_import.score", "workers": 1}, OWN_SANDBOX)
    ) as opened:
        assert opened.score_all([Answer("", Prompt(0, "?", ""))]) == [Score(0.0)]
    assert "slow_to_import" not in sys.modules


@pytest.mark.parametrize(
    ("tests", "form", "said"),
    [
        ("[" * 100_000, "stdio", "the answer is not a JSON list"),
        ("f" + ".a" * 30_000, "asserts", "not Python that can be run as tests: ."),
        ("assert f() == " + "-" * 100_000 + "1", "asserts", "not Python that can be run as tests: ."),
    ],
)
def test_tests_that_python_cannot_read_leave_a_completion_unscored(tests: str, form: str, said: str) -> None:
    with pytest.raises(UnscoredError, match=said):
        python.score(RIGHT, Prompt(0, "?", tests), tests=form, workers=1)


def test_parameters_out_of_range_are_told() -> None:
    found = registry.problems_with_table("rewards", "python", {"tests": "unit", "memory_mb": 1})
    assert [problem.in_table for problem in found] == [
        "tests: got 'unit'; needs one of 'asserts', 'stdio'",
        "memory_mb: got 1; needs a whole number from 64 to 1048576",
    ]


@pytest.mark.parametrize(
    ("output", "wanted", "alike"),
    [
        ("1 \r\n2\n\n", "1\n2", True),
        ("", "\n", True),
        ("1", "1\n2", False),
        ("1\n2", "1", False),
        ("1\n\n2", "1\n2", False),
        (" 1\n 2", "1\n2", False),
        ("1\u2028", "1", True),
    ],
)
def test_outputs_are_compared_by_line_without_trailing_blanks(output: str, wanted: str, alike: bool) -> None:
    assert are_alike(output, wanted) is alike


def test_an_output_of_many_lines_is_compared_without_a_list_of_them() -> None:
    output = "ab \n" * 100_000
    tracemalloc.start()
    try:
        assert are_alike(output, output)
        assert tracemalloc.get_traced_memory()[1] < 15 * len(output)
    finally:
        tracemalloc.stop()
