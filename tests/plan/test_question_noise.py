"""Whether an `[[eval]]` needs more seeds or more questions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from retrain.plan.question_noise import paired_gains, question_means, question_noise
from retrain.records.layout import RunFiles
from retrain.records.samples import OutcomesWriter

SEEDS, QUESTIONS = 8, 16


def test_where_all_seeds_agree_only_questions_help() -> None:
    noise = question_noise(np.tile(np.linspace(-1, 1, QUESTIONS), (SEEDS, 1)))
    assert noise is not None
    assert (noise.by_seeds, noise.by_questions) == pytest.approx((0, 0.5))
    assert str(noise) == (
        "more questions are worth more than more seeds: twice the questions (16 now) would remove 50% of the "
        "variance of the difference, twice the seeds (8 now) 0%"
    )


def test_where_all_questions_agree_only_seeds_help() -> None:
    noise = question_noise(np.tile(np.linspace(-1, 1, SEEDS), (QUESTIONS, 1)).T)
    assert noise is not None
    assert (noise.by_seeds, noise.by_questions) == pytest.approx((0.5, 0))
    assert str(noise).startswith("more seeds are worth more than more questions")


def test_shares_are_those_of_the_variances_that_made_the_differences() -> None:
    """Variances 0.02 by seed, 0.3 by question, 1 of both: 0.02/8, 0.3/16 and 1/128 of the mean's."""
    rng, parts = np.random.default_rng(0), np.array([0.02 / 8, 0.3 / 16, 1 / 128])
    shares = []
    for _ in range(2000):
        by_seed, by_question = rng.normal(0, 0.02**0.5, (SEEDS, 1)), rng.normal(0, 0.3**0.5, (1, QUESTIONS))
        noise = question_noise(by_seed + by_question + rng.normal(0, 1, (SEEDS, QUESTIONS)))
        assert noise is not None
        shares.append((noise.by_seeds, noise.by_questions))
    by_seeds, by_questions = (parts[0] + parts[2]) / parts.sum() / 2, (parts[1] + parts[2]) / parts.sum() / 2
    assert np.mean(shares, axis=0) == pytest.approx((by_seeds, by_questions), abs=0.05)


def test_nothing_is_said_of_few_seeds_or_of_equal_runs() -> None:
    assert question_noise(np.random.default_rng(0).normal(size=(5, QUESTIONS))) is None
    assert question_noise(np.full((SEEDS, QUESTIONS), 0.25)) is None


def test_questions_that_a_run_lacks_are_left_out() -> None:
    means = {("", name, seed): {1: 0.1, 2: 0.2, 3: 0.6} for name in ("a", "b") for seed in range(2)}
    means["", "b", 1] = {2: 1.2, 3: 0.6, 4: 1.0}
    gains = paired_gains(means, "a")
    assert gains is not None
    assert gains.tolist() == [[0, 0], [1.0, 0]]


def test_means_are_those_of_the_last_evaluation(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    writer = OutcomesWriter(files.evals, 1)
    writer.append("hard", 10, {7: [0, 0]})
    writer.append("hard", 20, {7: [1, 0.5], 8: [None, 1], 9: [None, None]})
    writer.close()
    assert question_means(files, "eval_hard_reward") == {7: 0.75, 8: 1}
    assert question_means(files, "eval_hard_correct_rate") == {7: 0.5, 8: 1}
    assert question_means(files, "eval_hard_pass_at_2") == question_means(files, "eval_reward") == {}
