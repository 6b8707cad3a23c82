"""Advantage estimators: hand-calculated values, invariants and refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from retrain.base import registry
from retrain.plugins.advantages import grpo, maxrl, reinforce_pp, rloo, taken_parts

REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
batches = arrays(float, (5, 4), elements=st.floats(-100, 100, width=32))
tied_batches = arrays(float, (5, 1), elements=st.floats(0, 100)).map(
    lambda column: np.repeat(column, 7, axis=1)
)


def test_grpo_subtracts_the_groups_mean():
    assert np.allclose(grpo.estimate(REWARDS)[:2], [[0.5, -0.5, -0.5, 0.5], [-0.25, -0.25, -0.25, 0.75]])


def test_grpo_scaled_has_unit_deviation_in_every_group_that_differs():
    assert np.allclose(grpo.estimate(REWARDS, scale=True)[:2].std(axis=1), 1)


def test_rloo_subtracts_the_mean_of_the_other_rollouts():
    rewards = np.array([[3.0, 1.0, 8.0]])
    assert np.allclose(rloo.estimate(rewards), [[3 - 4.5, 1 - 5.5, 8 - 2]])


def test_maxrl_divides_by_the_groups_mean():
    assert np.allclose(maxrl.estimate(REWARDS)[1], [-1, -1, -1, 3], atol=1e-4)


def test_maxrl_gives_zeros_to_a_group_without_success():
    assert np.all(maxrl.estimate(np.array([[0.0, 0.0], [0.0, 1e-7]])) == 0)


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ValueError, match="needs rewards of 0 or more"):
        maxrl.estimate(np.array([[-1.0, 0.0]]))


@given(rewards=batches)
def test_reinforce_pp_has_mean_zero_and_unit_deviation_over_the_batch(rewards):
    advantages = reinforce_pp.estimate(rewards)
    assert np.isclose(advantages.mean(), 0, atol=1e-6)
    assert np.isclose(advantages.std(), 1 if np.ptp(rewards) else 0)


def test_reinforce_pp_by_batch_credits_a_group_of_equal_rewards():
    assert np.all(reinforce_pp.estimate(REWARDS)[2] > 0)


def test_reinforce_pp_by_group_gives_such_a_group_nothing():
    advantages = reinforce_pp.estimate(REWARDS, baseline="group")
    assert np.all(advantages[2] == 0)
    assert np.isclose(advantages.std(), 1)


def test_reinforce_pp_by_batch_takes_one_rollout_per_prompt():
    assert np.allclose(reinforce_pp.estimate(np.array([[0.0], [1.0]])), [[-1], [1]])


@given(rewards=batches, estimator=st.sampled_from([grpo.estimate, rloo.estimate]))
def test_advantages_of_a_group_sum_to_zero(rewards, estimator):
    assert np.allclose(estimator(rewards).sum(axis=1), 0, atol=1e-9)


@given(rewards=tied_batches, name=st.sampled_from(["grpo", "rloo", "maxrl"]))
def test_equal_rewards_carry_no_signal_not_even_rounding(rewards, name):
    assert np.all(registry.find_plugin("advantages", name)(rewards) == 0)


@pytest.mark.parametrize(("name", "params"), [("grpo", {}), ("grpo", {"scale": True}), ("rloo", {})])
def test_sums_that_differ_by_rounding_carry_no_signal(name, params):
    assert not np.any(registry.find_plugin("advantages", name)(np.array([[0.1 + 0.2, 0.3, 0.3]]), **params))


@given(rewards=tied_batches)
def test_equal_rewards_scaled_are_zeros_never_nan(rewards):
    assert np.all(grpo.estimate(rewards, scale=True) == 0)


def called(name, rewards):
    """Call an estimator, one of parts with the rewards as its only part."""
    given = {"parts": {"reward": rewards}, "weights": {"reward": 1.0}}
    return registry.find_plugin("advantages", name)(rewards, **{key: given[key] for key in taken_parts(name)})


@pytest.mark.parametrize("name", registry.names("advantages"))
def test_rewards_are_left_as_they_were(name):
    rewards = REWARDS.copy()
    called(name, rewards)
    assert np.array_equal(rewards, REWARDS)
