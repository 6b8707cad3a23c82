"""Which prompts come next: what each curriculum prefers, and that it goes on after a resume."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from retrain import Prompt, find_plugin

PROMPTS = [Prompt(number, str(number), "") for number in range(60)]
RATES = np.repeat([0.0, 0.5, 1.0], 20)  # of the prompts: unsolvable, in between, mastered
NAMES = ["shuffle", "pool", "skip"]


def opened(name: str, seed: int = 1, **params: float):
    return find_plugin("curricula", name)(PROMPTS, seed=seed, **params)


def rewards_of(positions: list[int], rng: np.random.Generator, rollouts: int = 8) -> np.ndarray:
    return (rng.random((len(positions), rollouts)) < RATES[positions][:, None]).astype(float)


def play(curriculum, steps: int, seed: int = 0) -> list[int]:
    """Choose and observe; return all positions."""
    rng, chosen = np.random.default_rng(seed), []
    for _ in range(steps):
        positions = curriculum.choose(6)
        curriculum.observe(positions, rewards_of(positions, rng))
        chosen += positions
    return chosen


def test_shuffle_takes_each_prompt_once_an_epoch() -> None:
    chosen = play(opened("shuffle"), 20)
    assert sorted(chosen[:60]) == sorted(chosen[60:]) == list(range(60))
    assert chosen[:60] == np.random.default_rng([1, 0]).permutation(60).tolist()


@pytest.mark.parametrize("name", ["pool", "skip"])
def test_prompts_that_can_teach_come_more_often(name: str) -> None:
    counts = Counter(RATES[position] for position in play(opened(name), 200)[600:])
    assert counts[0.5] > 1.5 * max(counts[0.0], counts[1.0])
    assert min(counts[0.0], counts[1.0]) > 20


@pytest.mark.parametrize("name", NAMES)
def test_none_starves(name: str) -> None:
    assert set(play(opened(name), 1000)[-4800:]) == set(range(60))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at", [0, 1, 7, 30])
def test_a_resume_goes_on_to_the_bit(name: str, at: int) -> None:
    whole, first, resumed = opened(name), opened(name), opened(name)
    expected = play(whole, 40)
    assert play(first, at) == expected[: 6 * at]
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rng = np.random.default_rng(0)
    rng.random((6 * at, 8))  # rewards before the resume
    rest = []
    for _ in range(at, 40):
        positions = resumed.choose(6)
        resumed.observe(positions, rewards_of(positions, rng))
        rest += positions
    assert rest == expected[6 * at :]


def test_a_pool_expects_what_it_saw_and_forgets_it() -> None:
    pool = opened("pool", half_life=2.0)
    pool.observe([0, 1], np.array([[1.0, 1.0, 1.0, 0.0], [0.0, np.nan, 0.0, 0.0]]))
    assert pool.predict([0, 1, 2]) == pytest.approx([4 / 6, 1 / 5, 1 / 2])
    pool.observe([3], np.array([[1.0] * 4]))
    pool.observe([3], np.array([[1.0] * 4]))
    assert pool.predict([0]) == pytest.approx([2.5 / 4])  # counts of two steps ago are worth half


def test_a_pool_expects_of_an_unseen_prompt_what_the_others_showed() -> None:
    pool = opened("pool")
    seen = [*range(10), *range(40, 50)]  # half of them unsolvable, half mastered
    pool.observe(seen, np.repeat(RATES[seen], 8).reshape(20, 8))
    assert pool.predict([30]) == pytest.approx([0.5])
    drawn = np.random.default_rng(0).beta(*pool._prior(), size=1000)
    assert np.mean(np.abs(drawn - 0.5) < 0.4) < 0.15  # hardly one is between them


def test_a_pool_chooses_each_prompt_once_until_there_are_no_more() -> None:
    pool = opened("pool")
    assert sorted(pool.choose(60)) == list(range(60))
    counts = Counter(pool.choose(150))
    assert set(counts.values()) == {2, 3}


def test_skip_counts_ties_in_a_row_of_scored_rollouts_only() -> None:
    skip = opened("skip", explore=0.0, least=0.001)
    tied, half_scored, differ = [1.0, 1.0], [1.0, np.nan], [1.0, 0.0]
    skip.observe([0, 1, 2], np.array([tied, half_scored, differ]))
    assert skip.state_dict()["ties"] == [[0, 1]]
    assert 0 not in skip.choose(118)
    skip.observe([0], np.array([differ]))
    assert skip.state_dict()["ties"] == []
