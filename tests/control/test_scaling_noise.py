"""The gradient noise scale against AdaptDL's traces, known distributions, and odd input."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from retrain.control.rules.scaling import AdamScaleRule, AdaScaleRule, GradientNoiseScale, adam_preconditioner

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "scaling_rules.json").read_text())


def arrays_of(micro_gradients):
    return [[np.array(group) for group in micro] for micro in micro_gradients]


def squared_norms(gradients):
    """The squared norms of parts, (parts, groups), and of their mean, (groups,)."""
    local = [[np.square(group).sum() for group in part] for part in gradients]
    mean = [np.square(np.mean(parts, axis=0)).sum() for parts in zip(*gradients, strict=True)]
    return np.array(local), np.array(mean)


class Trace:
    """Replays recorded gradients; a lone gradient is paired with the step before's, if that was alone too."""

    def __init__(self):
        self.noise, self.progress, self.previous = GradientNoiseScale(), 0.0, None

    def take(self, gradients, scale):
        if len(gradients) > 1:
            self.noise.update(*squared_norms(gradients), scale)
        elif self.previous is not None:
            self.noise.update(*squared_norms([self.previous, gradients[0]]), scale, consecutive=True)
        self.previous = gradients[0] if len(gradients) == 1 else None
        self.progress += self.noise.gain(scale)

    def factor(self, scale):
        return AdaScaleRule().lr_factor(scale, grad_sqr=self.noise.sqr, grad_var=self.noise.var)

    def assert_like(self, step):
        assert np.allclose(self.noise.sqr, np.maximum(step["sqr_avg"], 0), rtol=1e-9)
        assert np.allclose(self.noise.var, np.maximum(step["var_avg"], 1e-6), rtol=1e-9)
        assert np.allclose(self.factor(step["scale"]), step["lr_factor"], rtol=1e-9)
        assert self.noise.gain(step["scale"]) == pytest.approx(step["gain"])
        assert self.progress == pytest.approx(step["progress"])


@pytest.mark.parametrize("case", PUBLISHED["estimator_single_process"], ids=lambda case: case["name"])
def test_estimates_of_one_process_are_as_published(case):
    trace = Trace()
    steps = case["steps"][:5] if "biased again" in case["name"] else case["steps"]
    for step in steps:
        trace.take(arrays_of(step["micro_grads"]), step["scale"])
        trace.assert_like(step)


def test_a_return_to_lone_gradients_starts_a_new_average():
    # AdaptDL mixes the two kinds here; the last two gradients, (1, 0) and (1, 2), alone give
    # L = 3, T = 2, so sqr = 2 T - L = 1 and var = 2 (L - T) = 2.
    trace = Trace()
    for step in next(c for c in PUBLISHED["estimator_single_process"] if "biased again" in c["name"])[
        "steps"
    ]:
        trace.take(arrays_of(step["micro_grads"]), step["scale"])
    assert (trace.noise.sqr, trace.noise.var) == (1, 2)
    assert trace.progress == pytest.approx(step["progress"])


@pytest.mark.parametrize("case", PUBLISHED["estimator_multi_replica"], ids=lambda case: case["name"])
def test_estimates_of_several_replicas_are_as_published(case):
    trace = Trace()
    for step in case["steps"]:
        trace.take(arrays_of([[g] for [g] in step["micro_grads_by_replica"]]), step["scale"])
        trace.assert_like(step)


def test_estimates_preconditioned_by_adam_are_as_published():
    case = PUBLISHED["estimator_adam_preconditioned"]
    beta2, second_moment, noise = case["betas"][1], np.zeros(2), GradientNoiseScale()
    for count, step in enumerate(case["steps"]):
        root = adam_preconditioner(second_moment, count, beta2, case["eps"])
        micro = np.array(step["micro"])
        noise.update(*squared_norms([[m / root] for m in micro]), step["scale"])
        second_moment = beta2 * second_moment + (1 - beta2) * micro.mean(axis=0) ** 2
        factor = AdamScaleRule().lr_factor(step["scale"], grad_sqr=noise.sqr, grad_var=noise.var)
        assert np.allclose(root, step["preconditioner_before_step"], rtol=1e-6)
        assert np.allclose([noise.sqr, noise.var], [step["sqr_avg"], step["var_avg"]], rtol=1e-6)
        assert np.allclose(factor, step["factor"], rtol=1e-6)
        assert noise.gain(step["scale"]) == pytest.approx(step["gain"], rel=1e-6)


def known(sqr, var):
    """A noise scale whose only estimate is exactly this: of two parts, T = sqr + var/2, L = sqr + var."""
    noise = GradientNoiseScale(smoothing=0)
    sqr, var = np.array(sqr), np.array(var)
    noise.update(np.stack([sqr + var, sqr + var]), sqr + var / 2, 2.0)
    return noise


@pytest.mark.parametrize("case", PUBLISHED["gain"])
def test_gain_is_as_published(case):
    noise = known(case["sqr"], case["var"])
    assert noise.gain(case["scale"]) == pytest.approx(case["gain"], rel=1e-6)
    assert noise.sqr.sum() == pytest.approx(case["sqr_sum"])
    assert noise.var.sum() == pytest.approx(case["var_sum"])


@pytest.mark.parametrize("case", PUBLISHED["initial_gain"])
def test_gain_before_any_estimate_is_as_published(case):
    assert GradientNoiseScale().gain(case["scale"]) == pytest.approx(case["gain"], rel=1e-12)


@pytest.mark.parametrize("parts", [2, 8])
def test_estimates_approach_the_truth_of_a_known_distribution(parts):
    # Gradients of a sample: mean (3, 4), variance 2 in each of two coordinates; initial batch 16.
    rng, noise, scale = np.random.default_rng(0), GradientNoiseScale(0.9999), 4.0
    for _ in range(4000):
        gradients = rng.normal([3, 4], math.sqrt(2 / (16 * scale / parts)), size=(parts, 2))
        noise.update(*squared_norms([[g] for g in gradients]), scale)
    assert noise.sqr[0] == pytest.approx(25, rel=0.01)
    assert noise.var[0] == pytest.approx(2 * 2 / 16, rel=0.05)


def test_consecutive_gradients_estimate_the_same_truth():
    rng, noise, scale = np.random.default_rng(0), GradientNoiseScale(0.9999), 4.0
    for _ in range(8000):
        before, now = rng.normal([3, 4], math.sqrt(2 / (16 * scale)), size=(2, 2))
        noise.update(*squared_norms([[before], [now]]), scale, consecutive=True)
    assert noise.sqr[0] == pytest.approx(25, rel=0.01)
    assert noise.var[0] == pytest.approx(2 * 2 / 16, rel=0.05)


def test_groups_are_estimated_apart_and_gain_sums_them():
    noise = known([1.0, 0.0], [1.0, 3.0])
    assert noise.sqr.tolist() == pytest.approx([1, 0])
    assert noise.var.tolist() == pytest.approx([1, 3])
    assert noise.gain(4) == pytest.approx((4 + 1) / (1 + 1))


def test_without_signal_the_noise_scale_is_infinite():
    assert known([0.0], [1.0]).noise_scale == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_estimate_that_is_not_finite_is_left_out(bad):
    noise = known([1.0], [3.0])
    assert not noise.update(np.array([[1.0], [bad]]), np.array([1.0]), 2.0)
    assert noise.var[0] == pytest.approx(3)


@pytest.mark.parametrize(
    ("local", "mean", "scale", "message"),
    [
        (np.ones((1, 1)), np.ones(1), 1.0, "needs at least 2"),
        (np.ones(2), np.ones(1), 1.0, r"needs \(n, groups\)"),
        (np.ones((2, 2)), np.ones(1), 1.0, r"needs \(n, groups\)"),
        (np.ones((2, 1)), np.ones(1), 0.0, "scale: got 0"),
        (np.ones((2, 2)), np.ones(2), 1.0, "earlier ones had 1"),
    ],
)
def test_input_that_does_not_fit_is_refused(local, mean, scale, message):
    noise = known([1.0], [1.0])
    with pytest.raises(ValueError, match=message):
        noise.update(local, mean, scale)


def test_a_smoothing_out_of_range_is_refused():
    with pytest.raises(ValueError, match="smoothing: got 1"):
        GradientNoiseScale(1)


def test_a_restored_noise_scale_goes_on_as_the_one_that_was_saved():
    saved, restored = known([1.0], [2.0]), GradientNoiseScale()
    restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    for noise in (saved, restored):
        noise.update(np.array([[3.0], [5.0]]), np.array([2.0]), 2.0)
    assert restored.state_dict() == saved.state_dict()
