"""Differences question by question: which noise is of seeds, which of questions, and what halves it."""

from __future__ import annotations

import tomllib
from math import comb
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from retrain.records.layout import CampaignFiles
from retrain.records.samples import OutcomesWriter
from retrain.results.report.questions import ByQuestion, sentence, summarize
from tests.extras.test_compare import compared
from tests.simulated import Simulated, write_campaign

METRIC = "eval_hard_correct_rate"


def crossed(
    of_seeds: float, of_questions: float, of_both: float, seeds: int = 4, questions: int = 40
) -> np.ndarray:
    rng = np.random.default_rng(1)
    parts = (of_seeds, (seeds, 1)), (of_questions, (1, questions)), (of_both, (seeds, questions))
    return sum(rng.normal(0, size, shape) for size, shape in parts)


def test_the_variance_of_two_by_two_differences_is_that_of_a_hand_calculation() -> None:
    found = summarize(np.array([[0.0, 0.4], [0.2, 1.0]]))  # seeds are rows
    assert found is not None
    # mean squares: seeds 2 * var(0.2, 0.6) = 0.16, questions 2 * var(0.1, 0.7) = 0.36, rest 0.04
    # variances: seeds 0.06 / 2, questions 0.16 / 2, rest 0.04 / 4
    assert found.difference == pytest.approx(0.4)
    assert (found.of_seeds, found.of_questions) == pytest.approx((0.03 / 0.12, 0.08 / 0.12))
    assert (found.more_seeds, found.more_questions) == (None, None)  # 0.03 is left for both, and not enough


def test_noise_is_told_apart_by_its_source() -> None:
    by_seeds, by_questions = summarize(crossed(0.3, 0, 0.01)), summarize(crossed(0, 0.3, 0.01))
    assert by_seeds is not None
    assert by_questions is not None
    assert by_seeds.of_seeds > 0.99
    assert by_seeds.more_questions is None
    assert by_questions.of_questions > 0.99
    assert (by_questions.more_seeds, by_questions.more_questions) == (None, pytest.approx(120, abs=2))


def test_as_many_more_questions_or_seeds_as_it_says_leave_a_quarter_of_the_variance() -> None:
    found = summarize(crossed(0.01, 0.1, 0.9))
    assert found is not None
    assert found.more_questions is not None
    assert found.more_seeds is not None
    by_questions = found.of_seeds + (1 - found.of_seeds) * 40 / (40 + found.more_questions)
    by_seeds = found.of_questions + (1 - found.of_questions) * 4 / (4 + found.more_seeds)
    assert (by_questions, by_seeds) == pytest.approx((0.25, 0.25), abs=0.02)


def test_intervals_hold_their_level() -> None:
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        gains = rng.normal(0, 0.1, (3, 1)) + rng.normal(0, 0.3, (1, 50)) + rng.normal(0, 0.3, (3, 50))
        found = summarize(gains)
        held += found is not None and found.low <= 0 <= found.high
    assert 0.92 <= held / 400 <= 0.98  # three standard errors around 95 %


def test_intervals_of_two_seeds_hold_their_level_too() -> None:
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        gains = rng.normal(0, 0.05, (2, 1)) + rng.normal(0, 0.1, (1, 500)) + rng.normal(0, 0.3, (2, 500))
        found = summarize(gains)
        held += found is not None and found.low <= 0 <= found.high
    assert held / 400 >= 0.95
    said = sentence(found)
    assert "wide, as two seeds tell little" in said
    assert said.endswith("a third seed narrows it most")


def test_equal_conditions_have_no_noise_to_tell_apart() -> None:
    assert summarize(np.zeros((3, 5))) is None


def with_outcomes(tmp_path: Path, asked: dict[str, int], seeds: int = 3) -> Path:
    """Two conditions; the second is right where the first is, and at every third question besides."""
    runs = {
        (condition, seed): Simulated([0.5] * 20, more=lambda step: {METRIC: 0.5})
        for condition in asked
        for seed in range(seeds)
    }
    directory = write_campaign(tmp_path, runs)
    for condition, seed in runs:
        files = CampaignFiles(directory).run(f"{condition}_s{seed}")
        table = {"name": "hard", "task": "copy", "options": {"length": asked[condition]}}
        raw = tomllib.loads(files.run_toml.read_text())
        files.run_toml.write_text(tomli_w.dumps({**raw, "eval": {"tables": [table]}}))
        writer = OutcomesWriter(files.evals, 1)
        for step, right in ((10, 0), (20, 1)):
            is_better = condition == "maxrl"
            rewards = {
                q: [float(right and ((q + seed) % 2 or (is_better and q % 3 == 0)))] for q in range(30)
            }
            writer.append("hard", step, rewards)
        writer.close()
    return directory


def by_question(directory: Path) -> ByQuestion | None:
    return compared(directory, metrics=[METRIC]).metrics[0].differences[0].by_question


def test_conditions_are_compared_question_by_question(tmp_path: Path) -> None:
    found = by_question(with_outcomes(tmp_path, {"grpo": 2, "maxrl": 2}))
    assert found is not None
    assert (found.seeds, found.questions) == (3, 30)
    assert found.difference == pytest.approx(5 / 30)


def test_a_run_that_lost_its_outcomes_is_left_out_alone(tmp_path: Path) -> None:
    directory = with_outcomes(tmp_path, {"grpo": 2, "maxrl": 2})
    (CampaignFiles(directory).run("grpo_s1").evals / "hard.jsonl").unlink()
    found = by_question(directory)
    assert found is not None
    assert (found.seeds, found.questions) == (2, 30)


def test_pass_at_k_has_an_interval_over_questions_and_seeds(tmp_path: Path) -> None:
    """By the estimator of Chen et al. 2021: 1 - C(n - c, k) / C(n, k), with c of n samples right."""
    right = {"grpo": (0, 1, 2, 0, 1, 3), "maxrl": (1, 1, 4, 0, 2, 3)}  # of 4 samples of each question
    metric = "eval_hard_pass_at_2"
    runs = {
        (condition, seed): Simulated([0.5] * 20, more=lambda step: {metric: 0.5})
        for condition in right
        for seed in range(3)
    }
    directory = write_campaign(tmp_path, runs)
    for condition, seed in runs:
        files = CampaignFiles(directory).run(f"{condition}_s{seed}")
        table = {"name": "hard", "task": "copy", "samples": 4}
        raw = tomllib.loads(files.run_toml.read_text())
        files.run_toml.write_text(tomli_w.dumps({**raw, "eval": {"tables": [table]}}))
        writer = OutcomesWriter(files.evals, 1)
        writer.append("hard", 20, {q: [1.0] * c + [0.0] * (4 - c) for q, c in enumerate(right[condition])})
        writer.close()
    found = compared(directory, metrics=[metric]).metrics[0].differences[0].by_question
    assert found is not None
    each = {name: [1 - comb(4 - c, 2) / comb(4, 2) for c in counts] for name, counts in right.items()}
    gains = np.subtract(each["maxrl"], each["grpo"])
    half = 2.571 * gains.std(ddof=1) / 6**0.5  # all noise is of the 6 questions: t with 5 degrees of freedom
    assert (found.difference, found.questions) == (pytest.approx(gains.mean()), 6)
    assert (found.low, found.high) == pytest.approx((gains.mean() - half, gains.mean() + half), rel=1e-3)


def test_conditions_that_were_asked_other_questions_are_not(tmp_path: Path) -> None:
    assert by_question(with_outcomes(tmp_path, {"grpo": 2, "maxrl": 3})) is None
