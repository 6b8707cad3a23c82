"""Signs of cheating: faults per condition, and jumps of the reward that held-out prompts do not share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import signs
from retrain.results.report.signs import Jump, find_jump, signs_of_cheating
from tests.simulated import Simulated, side

STEPS = range(1, 41)
EVERY_TENTH = np.where(np.arange(1, 41) % 10 == 0, 1.0, np.nan)


def jump(low: float, high: float, at: int = 20, noise: float = 0.02) -> np.ndarray:
    reward = np.where(np.arange(40) < at, low, high)
    return reward + noise * np.cos(np.arange(40))


def test_a_jump_that_held_out_prompts_do_not_share_is_found() -> None:
    found = find_jump(STEPS, jump(0.2, 0.9), 0.2 * EVERY_TENTH)
    assert found is not None
    assert (found.step, found.held_out_rise) == (21, 0.0)
    assert found.rise == pytest.approx(0.7, abs=0.03)


def test_a_jump_that_held_out_prompts_share_is_learning() -> None:
    assert find_jump(STEPS, jump(0.2, 0.9), jump(0.2, 0.9) * EVERY_TENTH) is None


def test_a_held_out_reward_that_was_high_already_has_no_room_to_rise() -> None:
    assert find_jump(STEPS, jump(0.2, 0.95), 0.9 * EVERY_TENTH) is None
    assert find_jump(STEPS, jump(0.2, 0.95), 0.5 * EVERY_TENTH) is not None


@pytest.mark.parametrize(
    "reward", [np.linspace(0, 0.4, 40), jump(0.9, 0.2), jump(0.5, 0.55), np.full(40, np.nan)]
)
def test_steady_falling_small_and_unknown_rewards_are_no_jump(reward: np.ndarray) -> None:
    assert find_jump(STEPS, reward, 0.0 * EVERY_TENTH) is None


def test_a_jump_needs_an_evaluation_on_both_sides() -> None:
    late = np.where(np.arange(40) > 30, 0.2, np.nan)
    assert find_jump(STEPS, jump(0.2, 0.9), late) is None
    assert find_jump(STEPS, jump(0.2, 0.9), np.full(40, np.nan)) is None


def test_noise_of_a_long_run_is_no_jump() -> None:
    """As of 8 prompts a step, whose rewards differ by 0.3."""
    steps, rng = range(1, 501), np.random.default_rng(0)
    held_out = np.where(np.arange(500) % 20 == 19, 0.5, np.nan)
    found = [find_jump(steps, 0.5 + 0.1 * rng.normal(size=500), held_out) for _ in range(20)]
    assert sum(one is not None for one in found) <= 3


def test_a_reward_that_wanders_does_not_jump() -> None:
    """Of rewards whose autocorrelation is 0.5 or 0.9."""
    for autocorrelation in (0.5, 0.9):
        runs = [signs.noise(np.random.default_rng(run), autocorrelation, 0.1) for run in range(60)]
        assert sum(map(signs.is_jump_named, runs)) <= 3
        assert all(signs.is_jump_named(run + 0.6 * (signs.STEP > 250)) for run in runs[:10])


@given(rewards=st.lists(st.floats(-1e9, 1e9) | st.just(float("nan")), max_size=30))
def test_any_rewards_are_read(rewards: list[float]) -> None:
    found = find_jump(range(len(rewards)), np.array(rewards), np.zeros(len(rewards)))
    assert found is None or isinstance(found, Jump)


def test_the_report_names_faults_and_jumps(tmp_path: Path) -> None:
    def more(step: int) -> dict[str, float]:
        row = {"batch_size": 4, "group_size": 5, "reward_faults": 2, "reward_timeout_fraction": 0.25}
        row["reward_over_limits"] = 1
        return row | ({"eval_reward": 0.1} if step % 10 == 0 else {})

    told = list(signs_of_cheating([side(tmp_path, Simulated(jump(0.1, 0.9).tolist(), more=more), steps=40)]))
    assert told[0] == (
        "grpo: 0.1 of completions broke a rule of the sandbox (80 faults), 0.05 ran out of memory or files, "
        "0.25 took too long."
    )
    assert told[1].startswith(
        "grpo_s0: the reward jumps by 0.8 at step 21, the held-out reward changes by 0;"
    )
    assert len(told) == 2


def test_a_condition_without_faults_has_no_sign(tmp_path: Path) -> None:
    assert list(signs_of_cheating([side(tmp_path, Simulated([0.5] * 20))])) == []
