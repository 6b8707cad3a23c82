"""Losses against plain slow versions of their formulas, and slopes against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.plugins.losses import cispo, gspo, importance_sampling, ppo

SEQUENCE = np.array([7, 7, 7, 2, 2, 5])  # sequences need no order and no gapless numbers
LOSSES = {
    "importance_sampling": (importance_sampling.evaluate, {}),
    "ppo": (ppo.evaluate, {"clip_low": 0.2, "clip_high": 0.3}),
    "cispo": (cispo.evaluate, {"clip_low": 0.2, "clip_high": 0.3}),
    "gspo": (gspo.evaluate, {"clip_low": 0.1, "clip_high": 0.2}),
}


def clipped_surrogate(ratio, advantage, low, high):
    return -min(ratio * advantage, min(max(ratio, low), high) * advantage)


def slow_importance_sampling(new, old, advantages, sequence):
    return [-math.exp(n - o) * a for n, o, a in zip(new, old, advantages, strict=True)]


def slow_ppo(new, old, advantages, sequence):
    return [
        clipped_surrogate(math.exp(n - o), a, 0.8, 1.3) for n, o, a in zip(new, old, advantages, strict=True)
    ]


def slow_cispo(new, old, advantages, sequence):
    weights = [min(max(math.exp(n - o), 0.8), 1.3) for n, o in zip(new, old, strict=True)]
    return [-w * a * n for w, a, n in zip(weights, advantages, new, strict=True)]


def slow_gspo(new, old, advantages, sequence):
    values = []
    for mine, advantage in zip(sequence, advantages, strict=True):
        logs = [n - o for n, o, s in zip(new, old, sequence, strict=True) if s == mine]
        values.append(clipped_surrogate(math.exp(sum(logs) / len(logs)), advantage, 0.9, 1.2))
    return values


SLOW = {
    "importance_sampling": slow_importance_sampling,
    "ppo": slow_ppo,
    "cispo": slow_cispo,
    "gspo": slow_gspo,
}
tokens = st.tuples(st.floats(-3, -0.01), st.floats(-0.7, 0.7), st.floats(-2, 2))
batches = st.lists(tokens, min_size=6, max_size=6)


def unpack(rows):
    old, shift, advantages = np.array(rows).T
    return old + shift, old, advantages


@pytest.mark.parametrize("name", LOSSES)
@given(rows=batches)
def test_value_is_the_formula_written_out_token_by_token(name, rows):
    evaluate, params = LOSSES[name]
    terms = evaluate(*unpack(rows), SEQUENCE, **params)
    assert np.allclose(terms.value, SLOW[name](*unpack(rows), SEQUENCE))


def slope_by_differences(evaluate, new, old, advantages, params, step=1e-6):
    slopes = np.zeros(new.size)
    for token in range(new.size):
        nudge = step * (np.arange(new.size) == token)
        up = evaluate(new + nudge, old, advantages, SEQUENCE, **params).value.sum()
        down = evaluate(new - nudge, old, advantages, SEQUENCE, **params).value.sum()
        slopes[token] = (up - down) / (2 * step)
    return slopes


def distance_to_kinks(name, new, old, params):
    logs = new - old
    if name == "gspo":
        logs = np.array([logs[s == SEQUENCE].mean() for s in SEQUENCE])
    bounds = [math.log(1 - params["clip_low"]), math.log(1 + params["clip_high"])] if params else []
    return min((np.abs(logs - bound).min() for bound in bounds), default=1.0)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "gspo"])
@pytest.mark.parametrize("seed", range(30))
def test_slope_is_the_derivative_of_the_summed_value(name, seed):
    rng = np.random.default_rng(seed)
    old = rng.uniform(-3, -0.01, 6)
    new, advantages = old + rng.normal(0, 0.3, 6), rng.normal(size=6)
    evaluate, params = LOSSES[name]
    assert distance_to_kinks(name, new, old, params) > 1e-5, "choose another seed"
    slope = evaluate(new, old, advantages, SEQUENCE, **params).slope
    assert np.allclose(slope, slope_by_differences(evaluate, new, old, advantages, params), atol=1e-7)


@given(rows=batches)
def test_cispos_slope_holds_the_clipped_weight_constant(rows):
    new, old, advantages = unpack(rows)
    evaluate, params = LOSSES["cispo"]
    frozen = np.clip(np.exp(new - old), 0.8, 1.3)
    assert np.allclose(evaluate(new, old, advantages, SEQUENCE, **params).slope, -frozen * advantages)


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_is_the_plain_policy_gradient(name):
    evaluate, params = LOSSES[name]
    logprobs, advantages = np.linspace(-2, -0.1, 6), np.array([2.0, 2, 2, -1, -1, 3])
    terms = evaluate(logprobs, logprobs, advantages, SEQUENCE, **params)
    assert np.allclose(terms.slope, -advantages)
    assert not terms.clipped.any()


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_cut"),
    [(1.31, 1, True), (1.29, 1, False), (1.31, -1, False), (0.79, -1, True), (0.79, 1, False), (9, 0, False)],
)
def test_ppo_cuts_only_pushes_past_its_bounds(ratio, advantage, is_cut):
    terms = ppo.evaluate(
        np.log([ratio]), np.zeros(1), np.array([float(advantage)]), np.zeros(1, int), clip_high=0.3
    )
    assert terms.clipped[0] == is_cut
    assert (terms.slope[0] == 0) == (is_cut or advantage == 0)


def test_gspo_cuts_by_the_rollouts_ratio_not_the_tokens():
    new, old = np.array([0.5, -0.5, 0.5]), np.zeros(3)
    terms = gspo.evaluate(new, old, np.ones(3), np.array([0, 0, 1]))
    assert list(terms.clipped) == [False, False, True]


def test_cispo_leaves_small_weights_alone_by_default():
    terms = cispo.evaluate(np.array([-6.0, 2.0]), np.zeros(2), np.ones(2), np.zeros(2, int))
    assert np.allclose(terms.slope, [-math.exp(-6), -5.0])
    assert list(terms.clipped) == [False, True]


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_give_no_terms(name):
    evaluate, params = LOSSES[name]
    none = np.zeros(0)
    assert evaluate(none, none, none, np.zeros(0, int), **params).value.shape == (0,)
