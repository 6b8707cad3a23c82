"""Learning-rate rules against numbers of AdaptDL, and what a run's scaling decides."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.controllers.scaling import (
    RULES,
    AdamScaleRule,
    AdaScaleRule,
    LearningRateScaling,
    LEGWRule,
    LinearRule,
    SqrtRule,
)

PUBLISHED = json.loads((Path(__file__).parent / "data" / "scaling_rules.json").read_text())
exactly = {"rtol": 1e-12, "atol": 0}


@pytest.mark.parametrize("case", PUBLISHED["adascale_factor"])
def test_adascale_and_adamscale_are_as_published(case):
    facts = {"grad_sqr": np.array(case["sqr"]), "grad_var": np.array(case["var"])}
    assert np.allclose(AdaScaleRule().lr_factor(case["scale"], **facts), case["adascale"], **exactly)
    assert np.allclose(AdamScaleRule().lr_factor(case["scale"], **facts), case["adamscale"], **exactly)


@pytest.mark.parametrize(("rule", "name"), [(LinearRule(), "linear"), (SqrtRule(), "sqrt")])
def test_linear_and_sqrt_are_as_published(rule, name):
    for case in PUBLISHED[name]:
        assert rule.lr_factor(case["scale"]) == pytest.approx([case["factor"]])


@pytest.mark.parametrize("case", PUBLISHED["legw"])
def test_legw_is_as_published(case):
    rule = LEGWRule(case["base_warmup_epochs"], case["data_size"])
    facts = {"progress": case["progress"], "init_batch_size": case["init_batch_size"]}
    assert rule.lr_factor(case["scale"], **facts) == pytest.approx([case["factor"]])


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 1e4))
def test_adascale_lies_between_one_and_the_scale(sqr, var, scale):
    factor = AdaScaleRule().lr_factor(scale, grad_sqr=sqr, grad_var=var)[0]
    assert 1 - 1e-9 <= factor <= scale * (1 + 1e-9)


def test_a_rule_gives_one_factor_per_parameter_group():
    assert LinearRule().lr_factor(3, grad_sqr=np.ones(4), grad_var=np.ones(4)).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (AdaScaleRule(), "grad_sqr, grad_var: missing"),
        (LEGWRule(1, 10), "progress, init_batch_size: missing"),
    ],
)
def test_a_missing_fact_is_named(rule, message):
    with pytest.raises(ValueError, match=message):
        rule.lr_factor(2)


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf])
def test_a_scale_that_is_not_positive_is_refused(scale):
    with pytest.raises(ValueError, match="scale: got"):
        LinearRule().lr_factor(scale)


def test_legw_refuses_an_empty_data_set():
    with pytest.raises(ValueError, match="data_size: got 0"):
        LEGWRule(1, 0)


def test_every_rule_of_the_toml_exists():
    assert sorted(RULES) == ["adamscale", "adascale", "legw", "linear", "none", "sqrt"]


# Two parts of orthogonal unit gradients: no signal, noise only.
NOISE = (np.array([[1.0, 1.0], [1.0, 1.0]]), np.array([0.5, 0.5]))


def test_a_run_at_its_initial_batch_keeps_its_learning_rate():
    scaling = LearningRateScaling(AdaScaleRule(), 8)
    decision = scaling.decide(8)
    scaling.observe(decision, *NOISE)
    assert (scaling.decide(8).lr_factor, scaling.decide(8).progress) == (1, 1)


def test_a_run_in_pure_noise_scales_in_proportion_to_its_batch():
    scaling = LearningRateScaling(AdaScaleRule(), 8)
    scaling.observe(scaling.decide(8), *NOISE)
    decision = scaling.decide(64)
    assert decision.lr_factor == pytest.approx(8)
    assert decision.gain == pytest.approx(8)
    assert "batch x8" in decision.reason


def test_before_any_estimate_a_larger_batch_changes_next_to_nothing():
    decision = LearningRateScaling(AdaScaleRule(), 8).decide(64)
    assert decision.lr_factor == pytest.approx(1, abs=1e-5)
    assert "not yet known" in decision.reason


@pytest.mark.parametrize("moments", [(None, None), (NOISE[0][:1], NOISE[1])])
def test_a_step_that_teaches_nothing_still_counts_as_progress(moments):
    scaling = LearningRateScaling(AdaScaleRule(), 8)
    scaling.observe(scaling.decide(8), *moments)
    assert scaling.decide(8).progress == 1
    assert "not yet known" in scaling.decide(8).reason


def test_a_restored_run_decides_as_the_one_that_was_saved():
    saved = LearningRateScaling(AdamScaleRule(), 8)
    saved.observe(saved.decide(16), *NOISE)
    restored = LearningRateScaling(AdamScaleRule(), 8)
    restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert restored.decide(32) == saved.decide(32)
