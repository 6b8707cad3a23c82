"""Scoring a step: what is wrong, what is unknown, and what stops the run."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from retrain.base import registry
from retrain.base.errors import ConfigError, InfrastructureError, RunFailedError
from retrain.base.rollouts import Episode, Group, Prompt, Rollout
from retrain.plugins.rewards.opening import is_pure, range_of
from retrain.trainer.batch import ScoredBatch
from retrain.trainer.scoring import Scorer
from tests.semaphore_processes import wait_until

FUNCTIONS = "tests.reward_functions"
BY_COMMAND = f"{FUNCTIONS}.by_command"
HELD = f"{FUNCTIONS}.held"


@contextmanager
def scorer(name: str, **params: object) -> Iterator[Scorer]:
    opened = Scorer(name, params)
    try:
        yield opened
    finally:
        opened.close()


def groups(*completions: tuple[str, ...]) -> list[Group]:
    return [group(Prompt(number, "?", "right"), texts) for number, texts in enumerate(completions)]


def group(prompt: Prompt, texts: tuple[str, ...]) -> Group:
    empty = np.zeros(0)
    return Group(prompt, tuple(Rollout(prompt, text, (), empty, (), truncated=False) for text in texts))


def score(name: str, *completions: tuple[str, ...], **params: object) -> ScoredBatch:
    with scorer(name, **params) as opened:
        return opened.score(groups(*completions))


def test_advice_about_a_time_limit_goes_with_an_episode_that_was_too_late() -> None:
    prompt = Prompt(0, "?", "")
    late, wrong = Episode(error="step took longer than 2 s", timed_out=True), Episode(error="no board")
    played = Group(prompt, tuple(Rollout(prompt, episode=one) for one in (late, wrong)))
    with scorer("match") as opened, pytest.raises(InfrastructureError) as caught:
        opened.score([played])
    assert "the last one: step took longer than 2 s; raise [environment].time_limit_s" in str(caught.value)


def test_a_step_without_a_turn_is_an_error_unless_the_programs_have_asked_before() -> None:
    prompt, solved = Prompt(0, "?", ""), Episode(reward=1.0)
    silent = Group(prompt, (Rollout(prompt, episode=solved),))
    asked = Group(prompt, (Rollout(prompt, tokens=(1,), episode=solved),))
    with scorer("match") as opened, pytest.raises(RunFailedError, match="none of 1 episodes got a turn"):
        opened.score([silent])
    with scorer("match") as opened:
        assert [opened.score([group]).rewards.item() for group in (asked, silent)] == [1.0, 1.0]


@pytest.mark.parametrize("name", ["match", BY_COMMAND, f"{FUNCTIONS}.by_command_later"])
def test_rewards_have_the_shape_of_prompts_and_rollouts(name: str) -> None:
    batch = score(name, ("right", "wrong", "wrong"), ("wrong", "right", "right"))
    assert batch.rewards.tolist() == [[1, 0, 0], [0, 1, 1]]
    assert (batch.error_fraction, batch.timeout_fraction) == (0, 0)


@pytest.mark.parametrize("name", [BY_COMMAND, f"{FUNCTIONS}.by_command_later"])
def test_what_is_unscored_has_no_reward_and_is_counted(name: str) -> None:
    batch = score(name, ("right", "unscored", "right", "wrong"), ("unscored", "late", "unscored", "late"))
    assert batch.scored.tolist() == [[True, False, True, True], [False] * 4]
    assert batch.known_rewards.tolist() == [1, 1, 0]
    assert (batch.error_fraction, batch.timeout_fraction) == (3 / 8, 2 / 8)


def test_a_policy_is_judged_by_the_rewards_that_are_known() -> None:
    batch = score(BY_COMMAND, ("right",), ("wrong",), ("right",), ("unscored",), ("late",))
    assert batch.known_rewards.tolist() == [1, 0, 1]
    assert batch.correct_rate == pytest.approx(2 / 3)


def test_a_program_that_hangs_has_earned_its_zero_and_is_counted() -> None:
    prompt = Prompt(0, "?", "assert x == 1")
    with scorer("python", timeout_s=1.5) as opened:
        batch = opened.score([group(prompt, ("x = 1", "x = 2", "import signal; signal.pause()"))])
    assert batch.rewards.tolist() == [[1, 0, 0]]
    assert batch.timeouts == 1
    assert {number: score.sign for number, score in batch.marked.items()} == {2: "took too long"}


@pytest.mark.parametrize("name", [BY_COMMAND, f"{FUNCTIONS}.by_command_later"])
def test_a_reward_that_is_not_finite_names_its_prompt(name: str) -> None:
    with pytest.raises(RunFailedError, match=f"'{name}', prompt 1: is nan; a reward must be a finite number"):
        score(name, ("right",), ("nan",))


def test_a_reward_beyond_what_statistics_hold_names_its_prompt() -> None:
    with pytest.raises(
        RunFailedError, match=r"prompt 0: is 1e\+300; a reward must be a finite number of at most"
    ):
        score(f"{FUNCTIONS}.odd", ("large",))


def test_a_function_that_raises_stops_the_run() -> None:
    with pytest.raises(RuntimeError, match="asked to raise"):
        score(BY_COMMAND, ("right", "raise"))


def test_a_step_without_a_score_is_an_infrastructure_failure_where_the_scorer_was_away() -> None:
    with pytest.raises(
        InfrastructureError,
        match=r"none of 3 completions .* failed or timed out for 2 of them; the last one: .*TimeoutError",
    ):
        score(BY_COMMAND, ("late",), ("late",), ("unscored",))


def test_a_step_of_which_nothing_can_be_judged_has_no_reward_and_says_why() -> None:
    batch = score(BY_COMMAND, ("unscored",), ("unscored",))
    assert np.isnan(batch.rewards).all()
    assert batch.outages == 0
    assert batch.marked[0].message.endswith("UnscoredError: asked not to tell")


BOUNDED = """
from retrain.plugins.rewards.pool import VerifierScorer
from tests.reward_functions import a_million as given

RANGE = {range}

def score(completion, prompt):
    return given(completion, prompt)
"""
POOLED = """
def open_scorer():
    return VerifierScorer("tests.reward_functions.a_million", {}, workers=1, timeout_s=30)
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Write a reward with a RANGE of its own; gives its dotted path."""

    def write(bounds: str, further: str = "") -> str:
        name = f"bounded_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(BOUNDED.replace("{range}", bounds) + further)
        monkeypatch.syspath_prepend(tmp_path)
        return f"{name}.score"

    return write


@pytest.mark.parametrize("further", ["", POOLED])
def test_a_reward_that_its_verifier_cannot_give_is_refused_and_counted(
    plugin: Callable[[str, str], str], further: str
) -> None:
    batch = score(plugin("(0.0, 1.0)", further), ("right", "million", "wrong"), ("below", "nan", "right"))
    assert batch.scored.tolist() == [[True, False, True], [False, False, True]]
    assert batch.known_rewards.tolist() == [1, 0, 1]
    assert batch.error_fraction == 0.5


def test_a_reward_that_only_gives_what_its_verifier_cannot_fails_the_run(
    plugin: Callable[[str, str], str],
) -> None:
    with pytest.raises(RunFailedError, match=r"outside its range 0 to 1; correct the reward or its RANGE"):
        score(plugin("(0.0, 1.0)", ""), ("million",), ("million",))


def test_so_it_is_inside_a_weighted_sum(plugin: Callable[[str, str], str]) -> None:
    parts = {plugin("(0.0, 1.0)", ""): 1e-6, "match": 1.0}
    batch = score("weighted", ("right", "million"), parts=parts)
    assert batch.scored.tolist() == [[True, False]]


def test_a_line_of_garbage_is_counted_and_stops_nothing() -> None:
    batch = score("custom", ("", "garbage\n"), ("", ""), path=f"{FUNCTIONS}.writing", workers=1)
    assert batch.scored.tolist() == [[True, False], [True, True]]
    assert batch.error_fraction == 0.25


def test_a_reward_of_somebodys_own_may_be_any_finite_number() -> None:
    assert score(f"{FUNCTIONS}.a_million", ("right", "below", "million")).rewards.tolist() == [[1, -0.5, 1e6]]


@pytest.mark.parametrize("bounds", ["(1.0, 0.0)", "'0..1'", "(0.0, float('inf'))", "(0.0,)"])
def test_a_range_that_is_none_is_named(plugin: Callable[[str, str], str], bounds: str) -> None:
    with pytest.raises(ConfigError, match=r"RANGE is .*; needs the lowest"):
        Scorer(plugin(bounds, ""), {})


@pytest.mark.parametrize("name", registry.built_in_names("rewards"))
def test_every_verifier_of_ours_says_what_it_gives(name: str) -> None:
    bounds = range_of(name)
    own = {"custom", "weighted"}  # a user's function, and parts that are held to their own bounds
    penalties = {"length": (-1.0, 0.0)}
    others = (-math.inf, math.inf) if name in own else (0.0, 1.0)
    assert (bounds.low, bounds.high) == penalties.get(name, others)


def test_a_scorer_that_leaves_one_out_is_named(plugin: Callable[[str, str], str]) -> None:
    lossy = "from retrain.plugins.rewards.opening import CallingScorer\n\n"
    lossy += "class Lossy(CallingScorer):\n    def score_all(self, answers):\n        return []\n\n"
    name = plugin("(0.0, 1.0)", f"{lossy}def open_scorer():\n    return Lossy(score)\n")
    with pytest.raises(RunFailedError, match="returned 0 scores for 2 completions"):
        score(name, ("right", "wrong"))


def test_a_weighted_reward_of_processes_and_functions_scores_a_batch() -> None:
    parts = {"match": 0.5, "custom": {"weight": 0.5, "params": {"path": f"{FUNCTIONS}.length"}}}
    batch = score("weighted", ("right", "x" * 100), parts=parts)
    assert batch.rewards.tolist() == [[pytest.approx(0.525), pytest.approx(0.5)]]


def test_one_scorer_scores_many_steps() -> None:
    with scorer("custom", path=f"{FUNCTIONS}.slowly_right", workers=1) as opened:
        for _ in range(3):
            assert opened.score(groups(("right", "wrong"))).rewards.tolist() == [[1, 0]]


def test_a_reward_that_does_not_exist_cannot_be_opened() -> None:
    with pytest.raises(ConfigError, match="did you mean 'match'"):
        Scorer("mtach", {})


@pytest.mark.parametrize("name", [f"{FUNCTIONS}.odd", f"{FUNCTIONS}.odd_later"])
@pytest.mark.parametrize("result", ["none", "text", "list", "array"])
def test_a_reward_that_is_no_number_names_the_prompt_and_is_never_guessed(name: str, result: str) -> None:
    with pytest.raises(RunFailedError, match=f"^reward {name!r}, prompt 0: must be a number; got"):
        score(name, (result, result))


def test_so_does_one_from_a_process_of_its_own() -> None:
    with pytest.raises(RunFailedError, match=r"must be a number; got '0.5', for prompt 0"):
        score("custom", ("text",), path=f"{FUNCTIONS}.odd")


def test_true_is_right_and_so_worth_1() -> None:
    assert score(f"{FUNCTIONS}.odd", ("true", "true")).rewards.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("name", [f"{FUNCTIONS}.grader", f"{FUNCTIONS}.wrapped"])
def test_what_gives_coroutines_is_awaited_however_it_was_written(name: str) -> None:
    assert score(name, ("right", "wrong")).rewards.tolist() == [[1.0, 0.0]]


def test_what_a_coroutine_raises_arrives_as_it_was_raised() -> None:
    with pytest.raises(InfrastructureError, match="the network is down"):
        score(f"{FUNCTIONS}.gives_up", ("wrong", "down", "down"))
    with pytest.raises(RuntimeError, match="asked to raise"):
        score(f"{FUNCTIONS}.by_command_later", ("raise", "raise"))


@pytest.mark.parametrize("name", [BY_COMMAND, f"{FUNCTIONS}.by_command_later"])
def test_a_reward_that_ends_the_process_is_named(name: str) -> None:
    with pytest.raises(RunFailedError, match=rf"^reward {name!r}, prompt 0: called sys.exit\(3\)"):
        score(name, ("right", "leave", "wrong"))


def test_a_coroutine_that_was_cancelled_from_within_is_unscored() -> None:
    batch = score(f"{FUNCTIONS}.gives_up", ("wrong", "cancelled"))
    assert (batch.known_rewards.tolist(), batch.errors) == ([0.0], 1)


def test_a_second_parameter_named_answer_gets_its_text() -> None:
    path = f"{FUNCTIONS}.by_answer"
    for name, given in ((path, {}), ("custom", {"path": path})):
        assert score(name, ("right", "ht", "wrong"), **given).rewards.tolist() == [[1.0, 1.0, 0.0]]


def test_a_function_of_trls_signature_gets_the_columns_of_the_rows() -> None:
    rows = [{"solution": "right", "level": 1}, {"solution": "other", "level": 2}]
    prompts = [Prompt(number, "?", "right", row=row) for number, row in enumerate(rows)]
    params, path = {"bonus": 0.25}, f"{FUNCTIONS}.as_in_trl"
    for name, given in ((path, params), ("custom", {"path": path, "params": params})):
        with scorer(name, **given) as opened:
            batch = opened.score([group(prompt, ("right", "other", "unscored")) for prompt in prompts])
        assert np.allclose(batch.known_rewards, [1.25, 0.25, 0.5, 1.5])
        assert (batch.errors, batch.scored[:, 2].any()) == (2, False)


def test_it_gets_the_completions_tokens_and_how_far_the_run_is() -> None:
    drawn = [
        replace(rollout, tokens=(number, 9)) for number, rollout in enumerate(groups(("a", "b"))[0].rollouts)
    ]
    prompt, path = Prompt(0, "?", "right"), f"{FUNCTIONS}.late_as_in_trl"
    for name, given in ((path, {}), ("custom", {"path": path})):
        with closing(Scorer(name, given, max_steps=8)) as opened:
            assert opened.score([Group(prompt, tuple(drawn))], 2).rewards.tolist() == [[0.25, 0.26]]


def test_so_does_a_coroutine_function_and_one_for_chats() -> None:
    assert score(f"{FUNCTIONS}.as_in_trl_later", ("right", "wrong")).rewards.tolist() == [[1.0, 0.0]]
    prompt = Prompt(0, "?", "", (("user", "right"),))
    with scorer(f"{FUNCTIONS}.chatting_as_in_trl") as opened:
        assert opened.score([group(prompt, ("right", "wrong"))]).rewards.tolist() == [[1.0, 0.0]]


def test_it_gets_all_of_them_though_it_calls_itself_pure(plugin: Callable[[str, str], str]) -> None:
    name = plugin("(0.0, 1.0)", "\nPURE = True\ndef score(completions, **columns):\n    return completions\n")
    assert not is_pure(name, {})


def test_a_column_that_is_not_there_is_named_and_so_is_a_wrong_number_of_rewards() -> None:
    with pytest.raises(
        ConfigError, match=r"the reward needs solution; if the data has it, name it in \[data"
    ):
        score(f"{FUNCTIONS}.as_in_trl", ("right", "wrong"))
    with pytest.raises(RunFailedError, match="returned 1 rewards for 2 completions"):
        score(f"{FUNCTIONS}.too_few_as_in_trl", ("right", "wrong"))
    with pytest.raises(RunFailedError, match="nothing_as_in_trl': returned None, not a list of rewards"):
        score(f"{FUNCTIONS}.nothing_as_in_trl", ("right", "wrong"))
    with pytest.raises(RunFailedError, match=r"returned array\(1\.\), not a list of rewards"):
        score(f"{FUNCTIONS}.mean_as_in_trl", ("right", "wrong"))
    with pytest.raises(RunFailedError, match=r"returned 1\.0, not a list of rewards"):
        score("custom", ("right",), path=f"{FUNCTIONS}.alone_as_in_trl")


@pytest.mark.parametrize("name", [HELD, f"{HELD}_later", "custom", "weighted"])
def test_how_many_completions_are_scored_is_known_meanwhile(name: str, tmp_path: Path) -> None:
    gate = {"gate": str(tmp_path / "gate")}
    parts = {"match": 0.5, "held": {"reward": HELD, "weight": 0.5, "params": gate}}
    params = {"custom": {"path": HELD, "params": gate, "workers": 2}, "weighted": {"parts": parts}}
    with scorer(name, **params.get(name, gate)) as opened:
        for _ in range(2):
            step = threading.Thread(target=opened.score, args=(groups(("right", "held")),))
            step.start()
            wait_until(lambda: opened.progress() == "1 of 2 scored")
            Path(gate["gate"]).touch()
            step.join()
            Path(gate["gate"]).unlink()
            assert opened.progress() == ""


@pytest.mark.parametrize(
    ("name", "endless"), [(BY_COMMAND, "pause"), (f"{FUNCTIONS}.waiting_for_ever", "hang")]
)
def test_a_function_that_never_ends_is_counted_as_a_timeout(name: str, endless: str) -> None:
    script = f"""
from retrain.plugins.rewards import opening
from tests.trainer.test_scoring import score

opening.LIMIT_S = 1.5
batch = score({name!r}, ("right", {endless!r}, "wrong"))
assert batch.known_rewards.tolist() == [1, 0], batch.rewards
assert batch.scored.tolist() == [[True, False, True]]
assert batch.timeouts == 1
"""  # a process of its own, because pytest-timeout uses the only timer
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_each_call_of_a_batch_has_the_whole_limit() -> None:
    script = """
import ctypes, signal, time
from retrain.plugins.rewards import Answer, opening
from retrain.base.rollouts import Prompt

def reward(completion, prompt):
    if completion == "own":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(0)
    if completion == "hangs":
        time.sleep(60)
    if completion == "half":
        time.sleep(0.6)
    if completion == "waits":  # in C, until any signal comes
        began_s = time.monotonic()
        ctypes.CDLL(None).pause()
        assert time.monotonic() - began_s > 0.99, "an alarm of another call's limit"
    return 1.0
def outcomes(*completions):
    scorer = opening.CallingScorer(reward)
    answers = [Answer(completion, Prompt(0, "?", "")) for completion in completions]
    return [str(score.outcome) for score in scorer.score_all(answers)]

before = signal.getsignal(signal.SIGALRM)
opening.LIMIT_S = 1.0
assert outcomes("half", "half", "half", "hangs", "half", "own", "hangs") == [
    *["scored"] * 3, "timeout", "scored", "scored", "timeout"
]
assert outcomes("half", "waits") == ["scored", "timeout"]
assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
assert signal.getsignal(signal.SIGALRM) == before
"""  # a process of its own, because pytest-timeout uses the only timer
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
