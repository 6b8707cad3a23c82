"""Rewards in killable processes: limits hold, neighbours do not notice, nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.base import registry
from retrain.base.errors import ConfigError, InfrastructureError, RunFailedError
from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import Answer, BatchScorer, Outcome, Score, UnscoredError, custom
from retrain.plugins.rewards.pool import Reply, ReplyKind, line_of, reply_in
from tests.semaphore_processes import wait_until
from tests.stopping import has_ended

FUNCTIONS = "tests.reward_functions"
PROMPT = Prompt(7, "?", "right")


def answers(*completions: str) -> list[Answer]:
    return [Answer(completion, PROMPT) for completion in completions]


@pytest.fixture(scope="module")
def pool() -> Iterator[BatchScorer]:
    scorer = custom.open_scorer(path=f"{FUNCTIONS}.by_command", timeout_s=60.0, workers=2)
    yield scorer
    scorer.close()


@pytest.fixture(scope="module")
def impatient() -> Iterator[BatchScorer]:
    """A pool whose limit is short, and long enough for a busy machine to answer in."""
    scorer = custom.open_scorer(path=f"{FUNCTIONS}.by_command", timeout_s=1.5, workers=2)
    yield scorer
    scorer.close()


def scores(scorer: BatchScorer, *completions: str) -> list[Score]:
    found = scorer.score_all(answers(*completions))
    assert isinstance(found, list)
    return found


def test_scores_come_in_order_and_processes_are_used_again(pool: BatchScorer) -> None:
    assert [s.value for s in scores(pool, *["right", "wrong"] * 20)] == [1.0, 0.0] * 20
    processes = {s.value for _ in range(3) for s in scores(pool, *["pid"] * 8)}
    assert len(processes) <= 2


def test_a_call_that_holds_the_interpreter_is_a_timeout_and_the_others_are_scored(
    impatient: BatchScorer,
) -> None:
    found = scores(impatient, "pause", "right", "pause", "right")
    assert [(s.value, s.outcome) for s in found] == [(None, Outcome.TIMEOUT), (1.0, Outcome.SCORED)] * 2
    assert found[0].message == "took over 1.5 s"


def test_a_users_file_named_like_one_of_pythons_own_modules_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('this is not the queue that was meant')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(filter(None, sys.path)))  # "" would be this directory
    scorer = custom.open_scorer(path=f"{FUNCTIONS}.by_command", workers=1)
    assert scores(scorer, "right")[0].value == 1.0
    scorer.close()


def test_the_clock_starts_when_a_call_does_not_when_it_is_queued(impatient: BatchScorer) -> None:
    found = scores(impatient, "pause", "pause", "pause", "right", "right")
    assert [s.outcome for s in found] == [Outcome.TIMEOUT] * 3 + [Outcome.SCORED] * 2


def test_a_call_that_ends_its_process_is_an_error(pool: BatchScorer) -> None:
    died, right = scores(pool, "exit", "right")
    assert (died.value, died.outcome, died.message) == (None, Outcome.ERROR, "ended with exit code 3")
    assert right.value == 1.0


def test_a_process_that_was_killed_while_idle_is_replaced(pool: BatchScorer) -> None:
    for pid in {int(s.value or 0) for s in scores(pool, "pid", "pid", "pid", "pid")}:
        os.kill(pid, signal.SIGKILL)
    assert [s.value for s in scores(pool, "right", "right")] == [1.0, 1.0]


GARBAGE = [
    "garbage\n",
    "\xff\x00\n",
    "[1, 2]\n",
    "{}\n",
    "null\n",
    '["", "ready", ""]\n',
    '["", "scored", 1.0, {}]\n',  # of no call
    '["0123456789abcdef", "scored", 1.0, {}]\n',  # of another one
    '["0123456789abcdef", "scored", true, {}]\n',
    '["0123456789abcdef", "scored", 1.0, {"format": "1"}]\n',
    '["0123456789abcdef", "scored", 1.0, []]\n',
    '["0123456789abcdef", "nonsense", "x", {}]\n',
    f'["0123456789abcdef", "scored", 1{"0" * 400}, {{}}]\n',
    "[" * 100_000 + "\n",
    "no end of line",
    "x" * 60_000,
]


@pytest.fixture(scope="module")
def writing() -> Iterator[BatchScorer]:
    scorer = custom.open_scorer(path=f"{FUNCTIONS}.writing", timeout_s=60, workers=1)
    yield scorer
    scorer.close()


@pytest.mark.parametrize("line", GARBAGE, ids=lambda line: ascii(line[:36]))
def test_a_line_of_garbage_costs_its_completion_and_no_other(writing: BatchScorer, line: str) -> None:
    first, spoilt, *rest = scores(writing, "", line, "", "")
    assert (spoilt.value, spoilt.outcome) == (None, Outcome.ERROR)
    assert "the scoring process" in spoilt.message
    assert [s.value for s in (first, *rest)] == [0.25] * 3


def test_a_second_answer_is_not_taken_for_the_next_call() -> None:
    """What comes late is refused as well, since every call has a token of its own."""
    first, second = (line_of(token, Reply(ReplyKind.SCORED, 1.0)) for token in ("a", "b"))
    assert reply_in(first, "a") == Reply(ReplyKind.SCORED, 1.0)
    assert reply_in(first + second, "a").kind == reply_in(second, "a").kind == ReplyKind.GARBAGE


@given(st.binary())
def test_no_line_can_break_the_pool(line: bytes) -> None:
    assert reply_in(line + b"\n", "a token").kind == ReplyKind.GARBAGE


def test_a_process_that_says_nonsense_at_its_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('welcome to this cluster')")
    monkeypatch.syspath_prepend(tmp_path)
    scorer = custom.open_scorer(path=f"{FUNCTIONS}.by_command", workers=1)
    with pytest.raises(InfrastructureError, match=r"did not start: .*welcome to this cluster"):
        scorer.score_all(answers("right"))
    scorer.close()


def test_a_function_may_say_that_it_cannot_tell(pool: BatchScorer) -> None:
    unscored, late = scores(pool, "unscored", "late")
    assert (unscored.value, unscored.outcome) == (None, Outcome.ERROR)
    assert re.fullmatch(r".*functions.py:\d+: UnscoredError: asked not to tell", unscored.message)
    assert (late.value, late.outcome) == (None, Outcome.TIMEOUT)


def test_a_function_that_raises_stops_the_run_and_names_the_prompt(pool: BatchScorer) -> None:
    with pytest.raises(
        RunFailedError, match=r"functions.py:\d+: RuntimeError: asked to raise; .*, for prompt 7"
    ):
        pool.score_all(answers("right", "raise"))


def test_long_completions_and_odd_characters_arrive_whole(pool: BatchScorer) -> None:
    text = "é\n\ud800" * 100_000
    found = pool.score_all([Answer(text, Prompt(0, "?", text))] * 4)
    assert [s.value for s in found] == [1.0] * 4  # type: ignore[union-attr]


def test_coroutine_functions_run_too() -> None:
    assert custom.score("right", PROMPT, path=f"{FUNCTIONS}.slowly_right") == 1.0


def test_a_single_score_raises_what_a_batch_counts() -> None:
    with pytest.raises(TimeoutError):
        custom.score("pause", PROMPT, path=f"{FUNCTIONS}.by_command", timeout_s=0.1)
    with pytest.raises(UnscoredError, match="asked not to tell"):
        custom.score("unscored", PROMPT, path=f"{FUNCTIONS}.by_command")


def test_a_function_that_is_not_there_is_a_mistake_in_the_file() -> None:
    def problems(path: str, **params: object) -> list[str]:
        return [problem.in_table for problem in custom.check_params({"path": path, "params": params})]

    assert "cannot be loaded" in "".join(problems(f"{FUNCTIONS}.nothing"))
    assert problems(f"{FUNCTIONS}.length", longest=5) == []
    assert "is called with (completion, prompt)" in "".join(problems("json.dumps"))
    assert "params.shortest: unknown parameter" in "".join(problems(f"{FUNCTIONS}.length", shortest=5))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        custom.score("a", PROMPT, path=f"{FUNCTIONS}.nothing")


def test_limits_out_of_range_are_told_together() -> None:
    table = {"path": "nowhere", "timeout_s": 0, "workers": -1}
    problems = registry.problems_with_table("rewards", "custom", table)
    assert [problem.where for problem in problems] == [("timeout_s",), ("workers",)]
    (problem,) = registry.problems_with_table("rewards", "custom", {"path": "nowhere"})
    assert problem.in_table.startswith("path: got 'nowhere'; needs the dotted path of a function")


def test_nothing_stays_behind_when_the_run_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    how = f"path='{FUNCTIONS}.with_child', params={{'pids': {str(pids)!r}}}"
    run = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from retrain.plugins.rewards import custom, Prompt; "
            f"custom.score('a', Prompt(0, '', ''), {how})",
        ],
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    )
    while not (pids.exists() and len(pids.read_text().split()) == 2):
        assert run.poll() is None
        time.sleep(0.005)
    left = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    wait_until(lambda: all(map(has_ended, left)))


def test_even_a_call_that_cannot_be_interrupted_ends_after_the_run_was_killed(tmp_path: Path) -> None:
    code = (
        "import psutil, sys\n"
        "from retrain.plugins.rewards import Answer, Prompt, custom\n"
        f"pool = custom.open_scorer(path='{FUNCTIONS}.by_command', timeout_s=1, workers=1)\n"
        "print(int(pool.score_all([Answer('pid', Prompt(0, '', ''))])[0].value), flush=True)\n"
        "pool.score_all([Answer('hang', Prompt(0, '', ''))])\n"
    )
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        worker = psutil.Process(int(run.stdout.readline()))
        before_s = worker.cpu_times().user
        while worker.cpu_times().user < before_s + 0.02:  # until it is in the call
            time.sleep(0.005)
        run.kill()
    wait_until(lambda: has_ended(worker))
