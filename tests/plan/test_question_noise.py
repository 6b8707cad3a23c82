"""Whether an `[[eval]]` needs more seeds or more questions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.base.rollouts import Floats
from retrain.control.rules.sequential import SequentialComparison
from retrain.plan.question_noise import chosen_questions, paired_gains, question_means, question_noise
from retrain.records.decision import Questions
from retrain.records.layout import RunFiles
from retrain.records.samples import OutcomesWriter
from retrain.records.windows import Window

SEEDS, QUESTIONS = 8, 16
MOST, FIRST, CAMPAIGNS = 64, 6, 2000  # questions, seeds that choose their number, simulated campaigns


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
    assert question_means(files, "eval_hard_reward", first=2) == {7: 0.75, 8: 1}


def test_means_over_a_window_are_those_of_the_evaluations_inside(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    rows = ({"step": step, "tokens_per_step": 5} for step in range(1, 31))
    files.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    writer = OutcomesWriter(files.evals, 1)
    for step, reward in ((0, 9), (10, 0), (20, 1), (30, 0.5)):  # 0: before training, in no window
        writer.append("hard", step, {7: [reward], 8: [1]})
    writer.close()
    for window, mean in (
        (Window("steps", 0, 20), 0.5),
        (Window("steps", 0, None), 0.5),
        (Window("steps", 10, 30), 0.75),
        (Window("steps", 11, 14), 0),  # none inside: the last one before
        (Window(end=20), 1),
        (Window("tokens", 0, 98), 0.5),
    ):
        assert question_means(files, "eval_hard_reward", window=window) == {7: mean, 8: 1}, window


def chosen(values: Floats, most: int = MOST) -> Questions:
    """Choose by values of shape (conditions, seeds, questions)."""
    seeds = [[dict(enumerate(condition.tolist())) for condition in seed] for seed in values.swapaxes(0, 1)]
    return chosen_questions("hard", seeds, values.shape[2], most)


def test_as_many_questions_are_asked_as_make_their_noise_as_small_as_the_rest() -> None:
    """Differences of 1 and -1 by turns on top of 0.125: 4/3 of variance, 1/64 of squared mean, 1/3 - 1/64."""
    gains = np.tile([[1.125, -0.875, 1.125, -0.875]], (FIRST, 1))
    assert chosen(np.array([gains, 0 * gains])) == Questions("hard", MOST, 4, 1.0)
    gains = np.tile([[3.0, 1.0, 3.0, 1.0]], (FIRST, 1))  # 4/3 / 4 of 4: the rest is larger
    assert chosen(np.array([gains, 0 * gains])) == Questions("hard", 4, 4, pytest.approx(1 / 12))
    gains = np.tile([[1.75, -0.25, 1.75, -0.25]], (FIRST, 1))  # 4/3 / 4 of 9/16; 4/3 / (9/16 - 1/3) = 5.8
    assert chosen(np.array([gains, 0 * gains])) == Questions("hard", 6, 4, pytest.approx(16 / 27))


def test_too_few_seeds_or_common_questions_choose_nothing() -> None:
    gains = np.random.default_rng(0).normal(size=(2, FIRST, 8))
    assert chosen(gains).are_more
    assert chosen(gains[:, 1:]) == Questions("hard", 8, 8, None)
    seeds: list[Sequence[Mapping[int, float]]] = [[{1: 0.5, 2: 1.0}, {2: 0.5, 3: 1.0}]] * FIRST
    assert chosen_questions("hard", seeds, 3, MOST) == Questions("hard", 3, 3, None)
    assert chosen(0 * gains) == Questions("hard", 8, 8, 0.0)


@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.integers(0, 2**FIRST - 1))
def test_the_choice_is_the_same_whichever_condition_had_which_values(
    seed: int, conditions: int, swaps: int
) -> None:
    values = np.random.default_rng(seed).standard_t(2, (conditions, FIRST, 5))
    swapped = values.copy()
    flips = [bool(swaps >> place & 1) for place in range(FIRST)]
    swapped[:2, flips] = swapped[1::-1, flips]
    assert chosen(swapped) == chosen(values)


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return rng.normal(size=shape)


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return rng.standard_t(1.5, shape)


def collapsing(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Questions right or wrong, and one run of ten that gets nothing right."""
    fails = rng.random((*shape[:2], 1)) < 0.1
    return ((rng.random(shape) < 0.6) & ~fails).astype(float)


def claims(values: Floats, count: int) -> bool:
    """Whether a campaign of two conditions claims a difference, looking after each seed."""
    new, old = values[:, :, :count].mean(axis=2)
    comparison = SequentialComparison(max_seeds=values.shape[1])
    looks = (comparison.look(new[:seeds], old[:seeds]) for seeds in range(FIRST, values.shape[1] + 1))
    return next((look.verdict for look in looks if look.verdict != "continue"), "") in ("better", "worse")


def campaigns(draw: Callable[..., Floats]) -> list[Floats]:
    """Return values of equal conditions, which differ by seed, by question, and by run."""
    rng, values = np.random.default_rng(1), []
    for _ in range(CAMPAIGNS):
        parts = [draw(rng, shape) for shape in ((1, SEEDS, 1), (1, 1, MOST), (2, SEEDS, 1), (2, SEEDS, MOST))]
        by_seed, by_question, by_run, rest = parts
        values.append(by_seed + by_question + 0.1 * by_run + rest)
    return values


@pytest.mark.parametrize("draw", [normal, heavy_tailed, collapsing])
def test_equal_conditions_are_told_apart_as_seldom_as_was_promised(draw: Callable[..., Floats]) -> None:
    """At an error of 0.05; 2,000 campaigns show 0.065 by chance in one of a thousand."""
    false, more = 0, 0
    for values in campaigns(draw):
        count = chosen(values[:, :FIRST, :4]).count
        more += count > 4
        false += claims(values, count)
    assert more > CAMPAIGNS / 4
    assert false / CAMPAIGNS < 0.065


def test_a_number_chosen_by_which_condition_is_ahead_would_break_the_promise() -> None:
    false = 0
    for values in campaigns(normal):
        false += any(claims(values, count) for count in (4, 8, 16, 32, MOST))
    assert false / CAMPAIGNS > 0.065
