"""Completions are cut over ranks, and what other ranks do with theirs."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from retrain.backends import BackendInfo, RankCall
from retrain.base.errors import ConfigError
from retrain.base.rollouts import Group, Prompt, Rollout
from retrain.plugins.rewards import Answer
from retrain.trainer.rank_scoring import Opening, close_part, cut, score_part
from retrain.trainer.scoring import Scorer

PURE = "tests.plugins.pure.score"
PROMPT = Prompt(0, "?", "1")
PROGRAM = Answer("```python\ndef f(): return 1\n```", Prompt(0, "?", "assert f() == 1"))


class Ranks:
    """Ranks that are all this process, with so many cores each."""

    def __init__(self, *cores: float) -> None:
        self.info, self.counts = BackendInfo(0, rank_cores=cores), list[list[int]]()

    def call_ranks(self, calls: Sequence[RankCall], told: Callable[[int], object]) -> list[Any]:
        found = [calls[0](told), *(pickle.loads(pickle.dumps(call))(told) for call in calls[1:])]
        self.counts.append([len(part or ()) for part in found])
        return found


def group_of(count: int) -> Group:
    drawn = [Rollout(PROMPT, "1" * n, (), np.zeros(0), (), truncated=False) for n in range(count)]
    return Group(PROMPT, tuple(drawn))


def test_completions_are_cut_by_the_ranks_weights():
    assert cut(6, [1.0, 1.0]) == [[0, 2, 4], [1, 3, 5]]
    assert cut(7, [4.0, 0.0, 2.0]) == [[0, 1, 3, 4, 6], [], [2, 5]]
    assert cut(1, [1.0, 1.0]) == [[0], []]


@pytest.mark.parametrize(
    ("reward", "params", "counts"), [(PURE, {}, [4, 4, 4]), ("custom", {"path": PURE}, [8, 0, 4])]
)
def test_what_starts_programs_is_cut_over_machines_by_their_cores(reward, params, counts):
    ranks = Ranks(4.0, 0.0, 2.0)
    with closing(Scorer(reward, params)) as alone, closing(Scorer(reward, params)) as scorer:
        known = alone.score([group_of(12)]).rewards
        scorer.use_ranks(ranks)
        assert scorer.score([group_of(12)]).rewards.tolist() == known.tolist()
    assert ranks.counts == [counts, [0, 0, 0]]


def test_programs_of_one_machine_are_scored_by_rank_0():
    ranks = Ranks(4.0, 0.0)
    with closing(Scorer("custom", {"path": PURE})) as scorer:
        scorer.use_ranks(ranks)
        scorer.score([group_of(12)])
    assert not ranks.counts


def test_a_rank_with_another_sandbox_is_refused():
    opening = pickle.dumps(Opening("python", {"sandbox": "process"}, None))
    try:
        assert score_part(opening, [PROGRAM], "process", lambda _: None)[0].value == 1
        with pytest.raises(
            ConfigError, match=r"\[reward\].sandbox: a rank runs programs in 'process', and ra"
        ):
            score_part(opening, [PROGRAM], "bubblewrap", lambda _: None)
    finally:
        close_part(opening, lambda _: None)
