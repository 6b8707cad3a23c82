"""Learning-rate rules against numbers of AdaptDL, and what a run's scaling decides."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.control.rules.scaling import (
    RULES,
    AdamScaleRule,
    AdaScaleRule,
    InformativeGroups,
    LearningRateScaling,
    LEGWRule,
    LinearRule,
    SqrtRule,
)

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "scaling_rules.json").read_text())
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


@pytest.mark.parametrize(
    ("fact", "value"),
    [("init_batch_size", 0), ("init_batch_size", -8), ("init_batch_size", math.nan), ("progress", -1)],
)
def test_a_fact_out_of_range_is_refused(fact, value):
    with pytest.raises(ValueError, match=f"{fact}: got {value}"):
        LEGWRule(1, 10).lr_factor(2, **{"progress": 1, "init_batch_size": 8, fact: value})


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


PAIR = {"consecutive": True}


def test_two_steps_in_a_row_teach_where_steps_have_a_single_part():
    scaling = LearningRateScaling(AdaScaleRule(), 1)
    taught = [scaling.observe(scaling.decide(1), *NOISE, **PAIR) for _ in range(2)]
    assert taught == [False, True]  # of the first, the update before is not known
    assert scaling.decide(8).lr_factor == pytest.approx(8)


def test_two_steps_of_different_size_teach_nothing():
    scaling = LearningRateScaling(AdaScaleRule(), 1)
    scaling.observe(scaling.decide(1), None, None)
    assert not scaling.observe(scaling.decide(2), *NOISE, **PAIR)


def test_a_chance_step_of_one_informative_group_does_not_start_a_new_average():
    scaling = LearningRateScaling(AdaScaleRule(), 4)
    scaling.observe(scaling.decide(4), *NOISE)
    before = scaling.state_dict()["noise"]
    assert not scaling.observe(scaling.decide(4), *NOISE, **PAIR)
    assert scaling.state_dict()["noise"] == before


def test_steps_that_shrank_to_one_prompt_are_paired_again():
    scaling = LearningRateScaling(AdaScaleRule(), 4)
    scaling.observe(scaling.decide(4), *NOISE)
    scaling.observe(scaling.decide(1), None, None)
    assert scaling.observe(scaling.decide(1), *NOISE, **PAIR)


def informative(share: float, prompts: int = 100) -> InformativeGroups:
    groups = InformativeGroups(init_batch_size=4)
    groups.count(round(share * prompts), prompts)
    return groups


def test_a_batch_is_as_large_as_its_informative_groups():
    # a quarter is informative: of four prompts none is in 0.75^4 of the batches
    has_any, large_has_any = 1 - 0.75**4, 1 - 0.75**32
    assert informative(0.25).effective_scale(8) == pytest.approx(8 * has_any / large_has_any)
    assert informative(0.25).per_initial_update == pytest.approx(4 * 0.25 / has_any)


@pytest.mark.parametrize(("share", "scale"), [(1, 8), (0, 1)])
def test_a_batch_grows_as_prompts_do_if_all_are_informative_and_not_at_all_if_none_is(share, scale):
    assert informative(share).effective_scale(8) == pytest.approx(scale)


@given(share=st.floats(0, 1), scale=st.floats(1, 1000))
def test_a_larger_batch_is_never_more_than_its_prompts(share, scale):
    assert 1 - 1e-6 <= informative(share, 1000).effective_scale(scale) <= scale * (1 + 1e-6)


def test_only_rules_that_rest_on_noise_look_at_informative_groups():
    decisions = []
    for rule in (AdaScaleRule(), LinearRule()):
        scaling = LearningRateScaling(rule, 4)
        scaling.count_groups(25, 100)
        scaling.observe(scaling.decide(4), *NOISE)
        decisions.append(scaling.decide(32))
    assert [d.lr_factor for d in decisions] == pytest.approx([8 * (1 - 0.75**4), 8], rel=1e-3)
    assert "batch x8 (x5.47 informative)" in decisions[0].reason


@pytest.mark.parametrize("share", [1.0, 0.5, 0.15])
def test_the_noise_scale_of_prompts_is_found_whatever_share_is_informative(share):
    # An informative group's gradient: mean 1, variance 50, so that noise and signal balance at 50
    # informative groups: 50 / share prompts.
    rng, scaling, prompts = np.random.default_rng(0), LearningRateScaling(AdaScaleRule(), 8, 0.9999), 64
    for _ in range(4000):
        count = int(rng.binomial(prompts, share))
        scaling.count_groups(count, prompts)
        if count < 2:
            continue
        parts = rng.normal(1, math.sqrt(50 / (count / 2)), size=(2, 1))
        scaling.observe(
            scaling.decide(prompts), np.square(parts), np.square(parts.mean(axis=0)), informative=count
        )
    assert scaling.decide(8).noise_scale == pytest.approx(50 / share, rel=0.2)


def test_a_restored_run_decides_as_the_one_that_was_saved():
    saved = LearningRateScaling(AdamScaleRule(), 8)
    saved.count_groups(5, 16)
    saved.observe(saved.decide(16), *NOISE, informative=5)
    restored = LearningRateScaling(AdamScaleRule(), 8)
    restored.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert restored.decide(32) == saved.decide(32)


def test_an_infinite_noise_scale_is_said_in_words():
    scaling = LearningRateScaling(AdaScaleRule(), 8)
    scaling.observe(scaling.decide(8), np.ones((2, 1)), np.zeros(1))
    assert scaling.decide(8).reason == "batch x1, noise but no signal measured: learning rate x1"
