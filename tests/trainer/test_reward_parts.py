"""Numbers beside a reward: in the rows, in evaluations, and what they say of right and wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from retrain.base.errors import ConfigError, RunFailedError
from retrain.base.rollouts import Episode, Group, Prompt
from retrain.config.load import parse
from retrain.plugins.rewards import weighted
from retrain.records.metrics import read_metrics
from retrain.records.samples import samples_of
from retrain.trainer.batch import BoundAlgorithm
from retrain.trainer.journal import choose
from tests.cli.test_cli import Call
from tests.trainer.test_scoring import FUNCTIONS, group, groups, score, scorer
from tests.trainer.test_trainer import SMALL, train

WEIGHTED = {"match": 1.0, "credit": {"reward": "partial", "weight": 0.5}}
NAN = np.nan


def test_each_part_of_a_weighted_reward_is_kept_by_name() -> None:
    batch = score("weighted", ("right", "rihgt"), parts={"match": 1.0, f"{FUNCTIONS}.by_answer": 0.5})
    assert batch.parts["match"].tolist() == [[1.0, 0.0]]
    assert batch.parts["tests_reward_functions_by_answer"].tolist() == [[1.0, 0.0]]
    assert batch.rewards.tolist() == [[1.5, 0.0]]


def test_a_part_that_is_unscored_leaves_the_others_known() -> None:
    asks = {"reward": f"{FUNCTIONS}.by_command", "weight": 1.0}
    batch = score("weighted", ("right", "unscored"), parts={"match": 1.0, "asks": asks})
    assert np.isnan(batch.rewards).tolist() == [[False, True]]
    assert batch.parts["match"].tolist() == [[1.0, 0.0]]
    assert (batch.part_means, batch.parts_unscored) == ({"match": 0.5, "asks": 1.0}, {"asks": 0.5})


def test_the_rows_of_a_run_and_its_evaluations_have_the_mean_of_each_part(tmp_path: Path) -> None:
    raw = {
        **SMALL,
        "training": {**SMALL["training"], "max_steps": 2, "eval_every": 1},
        "data": {"task": "successor", "eval_prompts": 4},
        "reward": {"reward": "weighted", "params": {"parts": WEIGHTED}},
        "eval": {"tables": [{"name": "hard", "every": 1, "samples": 2, "temperature": 1.0}]},
    }
    for row in read_metrics(train(tmp_path / "r", raw).directory):
        for reward, start in (
            ("mean_reward", "reward_"),
            ("eval_reward", "eval_reward_"),
            ("eval_hard_reward", "eval_hard_reward_"),
        ):
            assert row[reward] == pytest.approx(row[f"{start}match"] + 0.5 * row[f"{start}credit"])
        assert row["correct_rate"] >= row["reward_match"]
        assert not any(key.endswith("_unscored") for key in row)


@pytest.mark.parametrize("name", [f"{FUNCTIONS}.with_parts", "custom"])
def test_a_function_may_return_numbers_beside_its_reward(name: str) -> None:
    params = {"path": f"{FUNCTIONS}.with_parts"} if name == "custom" else {}
    batch = score(name, ("right", "odd"), **params)
    assert batch.rewards.tolist() == [[1.0, 0.0]]
    assert batch.parts["even"].tolist() == [[1.0, 1.0]]
    assert batch.part_means == {"length": 1.0, "even": 1.0}
    assert batch.parts_unscored == {"length": 0.5}


def test_so_may_one_of_trls_signature_and_what_it_logs_is_the_mean_of_its_calls() -> None:
    batch = score(f"{FUNCTIONS}.parts_as_in_trl", ("right", "unscored", "no"))
    assert np.array_equal(batch.parts["letters"], [[5.0, NAN, 2.0]], equal_nan=True)
    prompts = [Prompt(number, "?", "right", row={"level": number}) for number in (1, 2)]
    path = f"{FUNCTIONS}.logging_as_in_trl"
    for name, given in ((path, {}), ("custom", {"path": path})):
        with scorer(name, **given) as opened:
            batch = opened.score([group(prompt, ("right", "wrong")) for prompt in prompts])
        assert (batch.part_means, batch.known_rewards.sum()) == ({"levels_mean": 1.5}, 2.0)


def test_parts_within_a_part_are_named_after_both() -> None:
    batch = score("weighted", ("right",), parts={"own": {"reward": f"{FUNCTIONS}.with_parts", "weight": 2.0}})
    assert batch.part_means == {"own": 1.0, "own_length": 1.0, "own_even": 1.0}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("std", "the part 'std', whose column another one has: reward_std"),
        ("time_s", "reward_time_s"),
        ("se", "reward_se"),
        ("match_unscored", "choose another name"),
        ("Match", "the part 'Match'; a name has up to 64 of the characters a-z, 0-9 and _"),
        ("m" * 65, "up to 64"),
    ],
)
def test_a_name_that_a_row_cannot_have_stops_the_run_at_its_first_step(name: str, why: str) -> None:
    with pytest.raises(RunFailedError, match=why):
        score(f"{FUNCTIONS}.named", ("right",), part=name)


@pytest.mark.parametrize("value", ["much", [1.0]])
def test_a_part_that_is_no_number_is_named_with_its_prompt(value: object) -> None:
    with pytest.raises(RunFailedError, match=r"prompt 0: has a part 'length', which must be a number; got"):
        score(f"{FUNCTIONS}.with_parts", ("right",), value=value)
    with pytest.raises(RunFailedError, match=r"prompt 0: its part 'length' is inf"):
        score(f"{FUNCTIONS}.with_parts", ("right",), value=float("inf"))


@pytest.mark.parametrize(
    ("parts", "outcome", "why"),
    [
        (
            {"std": {"reward": "match", "weight": 1.0}},
            "",
            "parts: the part 'std', whose column another one has",
        ),
        (
            {"a.b": {"reward": "match", "weight": 1.0}, "a_b": {"reward": "match", "weight": 1.0}},
            "",
            r"parts.*: its column reward_a_b is that of 'a_b', too; choose another label",
        ),
        ({"match": 1.0}, "mathc", "outcome: got 'mathc'; did you mean 'match'"),
        ({f"part_{n}": {"reward": "match", "weight": 1.0} for n in range(33)}, "", "at most 32"),
    ],
)
def test_a_weighted_reward_with_such_a_part_is_refused_when_it_is_read(parts, outcome: str, why: str) -> None:
    raw = {"reward": {"reward": "weighted", "params": {"parts": parts, "outcome": outcome}}}
    with pytest.raises(ConfigError, match=why):
        parse(raw, "c")


@pytest.mark.parametrize(
    ("parts", "outcome", "name"),
    [
        ({"match": 0.4, "partial": 0.4}, "", "match"),
        ({"match": 0.4, "partial": 0.6}, "", "partial"),
        ({"match": 0.4, "partial": 0.6}, "match", "match"),
        ({"match": -1.0}, "", ""),
    ],
)
def test_the_heaviest_part_that_can_be_1_tells_right_from_wrong(parts, outcome: str, name: str) -> None:
    assert weighted.outcome({"parts": parts, "outcome": outcome}) == name


def test_right_is_told_whatever_shaped_parts_add() -> None:
    shaped = {
        "match": 0.5,
        "longest": {"reward": f"{FUNCTIONS}.length", "weight": 0.2, "params": {"longest": 5}},
    }
    batch = score("weighted", ("right", "wrong"), parts=shaped)
    assert batch.rewards.tolist() == [[0.7, 0.2]]
    assert batch.right is not None
    assert batch.right.tolist() == [[1.0, 0.0]]


def test_a_reward_whose_range_ends_at_1_has_right_answers_and_one_of_a_users_own_has_none() -> None:
    right = score("match", ("right", "wrong")).right
    assert right is not None
    assert right.tolist() == [[1.0, 0.0]]
    assert score(f"{FUNCTIONS}.by_answer", ("right", "wrong")).right is None


def test_an_outcome_that_is_no_part_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "def score(completion, prompt):\n    return 1.0, {'right': 1.0}\n\n\n"
    (tmp_path / "misnamed.py").write_text(f"{text}def outcome(params):\n    return 'rigth'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RunFailedError, match="prompt 0: outcome names the part 'rigth', and it has right"):
        score("misnamed.score", ("right",))


def test_rewards_of_an_environment_alone_have_no_notion_of_right() -> None:
    (played,) = groups(("right", "wrong"))
    rollouts = [replace(rollout, tokens=(1,), episode=Episode(reward=7.0)) for rollout in played.rollouts]
    with scorer("match") as opened:
        assert opened.score([Group(played.prompt, tuple(rollouts))]).right is None


def test_gdpo_learns_from_a_group_that_ties_in_its_reward_but_not_in_its_parts(tmp_path: Path) -> None:
    """Two parts that differ in scale cancel each other in the reward of every completion."""
    twice = {"reward": f"{FUNCTIONS}.with_parts", "weight": -1.0}
    params = {"parts": {"match": 1.0, "twice": twice}}
    raw = {"reward": {"reward": "weighted", "params": params}, "algorithm": {"advantage_mode": "gdpo"}}
    batch = score("weighted", ("right", "wrong"), **params)
    algorithm = BoundAlgorithm(parse(raw, "c"), lambda groups, step: batch)
    assert batch.tied.all()
    assert not algorithm.estimate(batch).any()  # both parts say the same
    differing = replace(batch, parts={"match": np.array([[1.0, 0.0]]), "twice": np.array([[0.0, 0.0]])})
    advantages = algorithm.estimate(differing)
    assert advantages[0, 0] == -advantages[0, 1] > 0
    assert not any(sample.tie for sample in choose(differing, advantages, 2))
    assert batch.summary(advantages, 1.0).zero_signal_group_fraction == 0.0


def test_a_run_with_gdpo_has_a_gradient(tmp_path: Path) -> None:
    raw = {
        **SMALL,
        "reward": {"reward": "weighted", "params": {"parts": WEIGHTED}},
        "algorithm": {"advantage_mode": "gdpo"},
    }
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert any(row["zero_signal_group_fraction"] < 1 and row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (1, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (40, -1.0)]
)
def test_the_penalty_for_length_is_that_of_dapo(tokens: int, penalty: float) -> None:
    """0 up to max_tokens - cache; (max_tokens - cache - length) / cache up to max_tokens; -1 beyond."""
    (asked,) = groups(("text" if tokens else "",))
    drawn = replace(asked.rollouts[0], tokens=(1,) * tokens)
    with scorer("length", max_tokens=16, cache=4) as opened:
        assert opened.score([Group(asked.prompt, (drawn,))]).rewards.tolist() == [[penalty]]


def test_it_stands_beside_what_tells_right_from_wrong_and_needs_a_cache_within_its_limit() -> None:
    length = {"weight": 2.0, "params": {"max_tokens": 4, "cache": 5}}
    raw = {"reward": {"reward": "weighted", "params": {"parts": {"match": 1.0, "length": length}}}}
    with pytest.raises(ConfigError, match=r"length.params.?.cache: got 5; needs at most max_tokens, 4"):
        parse(raw, "c")
    assert weighted.outcome({"parts": {"match": 1.0, "length": {**length, "params": {}}}}) == "match"


class Shaped:
    """Two turns, each with numbers beside its reward; the second one may leave scoring to `[reward]`."""

    def __init__(self, is_scored: bool) -> None:
        self._turns, self._is_scored = 0, is_scored

    def start(self, prompt: Prompt) -> str:
        return prompt.text

    def step(self, completion: str) -> object:
        self._turns += 1
        last = self._turns == 2
        reward = 0.5 if self._is_scored or not last else None
        return "1=", (reward, {"moves": self._turns, "length": None if last else 4.0}), last


def shaped(*, is_scored: bool = True) -> Shaped:
    return Shaped(is_scored)


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("turn_reward", "moves", "length"), [("final", 2.0, None), ("sum", 1.0 + 0.5 * 2.0, 4.0)]
)
def test_an_environment_may_return_numbers_beside_its_rewards(
    tmp_path: Path, processes: int, turn_reward: str, moves: float, length: float | None
) -> None:
    environment = {
        "environment": "tests.trainer.test_reward_parts.shaped",
        "turn_reward": turn_reward,
        "discount": 0.5,
        "processes": processes,
    }
    training = {**SMALL["training"], "max_steps": 1, "max_tokens": 64}
    raw = {**SMALL, "training": training, "environment": environment}
    (row,) = read_metrics(train(tmp_path / "r", raw).directory)
    assert (row["reward_moves"], row["reward_length"]) == (moves, length)
    assert row.get("reward_length_unscored") == (1.0 if length is None else None)


def test_they_stay_where_the_reward_scores_the_last_turn(tmp_path: Path) -> None:
    environment = {"environment": "tests.trainer.test_reward_parts.shaped", "options": {"is_scored": False}}
    reward = {"reward": "weighted", "params": {"parts": {"match": 1.0}}}
    training = {**SMALL["training"], "max_steps": 1, "max_tokens": 64}
    raw = {**SMALL, "training": training, "environment": environment, "reward": reward}
    (row,) = read_metrics(train(tmp_path / "r", raw).directory)
    assert (row["reward_moves"], row["reward_match"]) == (2.0, row["mean_reward"])


def test_kept_samples_show_the_parts(tmp_path: Path, retrain: Call) -> None:
    raw = {**SMALL, "reward": {"reward": "weighted", "params": {"parts": WEIGHTED}}}
    files = train(tmp_path / "r", raw)
    for sample in samples_of(files.samples):
        assert sample.reward == pytest.approx(sample.parts["match"] + 0.5 * sample.parts["credit"])
    assert re.search(r"\n  parts +match [01]  credit ", retrain("samples", str(files.directory)).stdout)
