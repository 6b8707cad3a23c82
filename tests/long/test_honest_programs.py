"""Ordinary programs that plain Python accepts score 1, or are unscored; wrong variants of them score 0."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import Answer, BatchScorer, Score, python
from tests.honest_programs import PAIRS

ACCEPTED = 0.97  # of honest programs, at least, score 1


@pytest.fixture(scope="module")
def scores() -> Iterator[dict[tuple[str, bool], Score]]:
    """The scores of all programs and wrong variants, by name and whether it is the honest one."""
    scorers: list[BatchScorer] = []
    found: dict[tuple[str, bool], Score] = {}
    for mode in ("asserts", "stdio"):
        scorer = python.open_scorer(tests=mode, workers=2, timeout_s=30.0, sandbox="process")
        scorers.append(scorer)
        keys, answers = [], []
        for pair in PAIRS:
            for program in filter(None, (pair.program, pair.wrong) if pair.mode == mode else ()):
                keys.append((pair.name, program is pair.program))
                answers.append(Answer(program, Prompt(0, "?", pair.tests)))
        found.update(zip(keys, scorer.score_all(answers), strict=True))
    yield found
    for scorer in scorers:
        scorer.close()


def test_the_corpus_is_large_and_names_are_unique() -> None:
    assert len({pair.name for pair in PAIRS}) == len(PAIRS) >= 300


def test_honest_programs_score_1_or_tell_why_they_have_no_score(
    scores: dict[tuple[str, bool], Score],
) -> None:
    honest = {name: score for (name, is_honest), score in scores.items() if is_honest}
    assert {name: score for name, score in honest.items() if score.value == 0} == {}
    assert [name for name, score in honest.items() if score.value is None and not score.message] == []
    assert sum(score.value == 1 for score in honest.values()) >= ACCEPTED * len(honest)


def test_wrong_variants_score_0(scores: dict[tuple[str, bool], Score]) -> None:
    assert {name: one for (name, is_honest), one in scores.items() if not is_honest and one.value != 0} == {}
