"""GDPO: each part of a reward is normalised within its group before the weighted sum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from retrain.base.errors import ConfigError, RunFailedError
from retrain.base.rollouts import Floats
from retrain.config.load import parse
from retrain.plan.build import plan_runs
from retrain.plan.preflight import preflight
from retrain.plugins.advantages import gdpo
from retrain.trainer.batch import open_advantage

NAN = np.nan
WEIGHTS = {"right": 1.0, "format": 0.5}
values = arrays(float, (2, 4, 6), elements=st.floats(-4, 4, width=16))


def published(parts: Floats, weights: list[float], eps: float = 1e-4) -> Floats:
    """The formula, value by value: parts have the shape (parts, prompts, rollouts), NaN where unscored.

    Source: arXiv:2601.05242; TRL adds eps to both deviations, which divide by n - 1.
    """
    total = np.zeros(parts.shape[1:])
    for part, weight in zip(parts, weights, strict=True):
        for group, rollouts in enumerate(part):
            known = [value for value in rollouts if not np.isnan(value)]
            if len(known) < 2:
                continue
            mean = sum(known) / len(known)
            deviation = (sum((value - mean) ** 2 for value in known) / (len(known) - 1)) ** 0.5
            for rollout, value in enumerate(rollouts):
                total[group, rollout] += 0 if np.isnan(value) else weight * (value - mean) / (deviation + eps)
    deviation = (((total - total.mean()) ** 2).sum() / (total.size - 1)) ** 0.5
    return (total - total.mean()) / (deviation + eps)


def parts_of(both: Floats) -> dict[str, Floats]:
    return dict(zip(WEIGHTS, both, strict=True))


@given(both=values)
def test_its_advantages_are_those_of_the_published_formula(both: Floats) -> None:
    rewards = both[0] + 0.5 * both[1]
    found = gdpo.estimate(rewards, parts=parts_of(both), weights=WEIGHTS)
    assert np.allclose(found, published(both, [1.0, 0.5]), atol=1e-6, rtol=1e-6)


@given(both=values, mask=arrays(bool, (2, 4, 6)))
def test_a_part_that_is_unscored_is_in_no_mean_and_no_spread(both: Floats, mask) -> None:
    parts = np.where(mask, NAN, both)
    found = gdpo.estimate(both[0], parts=parts_of(parts), weights=WEIGHTS)
    assert np.allclose(found, published(parts, [1.0, 0.5]), atol=1e-6, rtol=1e-6)


@given(both=values, factor=st.floats(1, 100))
def test_the_scale_of_a_part_changes_nothing(both: Floats, factor: float) -> None:
    both = np.round(both, 1)
    scaled = both * np.array([factor, 1.0])[:, None, None]
    found, wanted = (
        gdpo.estimate(each[0], parts=parts_of(each), weights=WEIGHTS, eps=1e-12) for each in (scaled, both)
    )
    assert np.allclose(found, wanted, atol=1e-6)


def test_rewards_that_tie_have_a_signal_where_their_parts_differ() -> None:
    """Which GRPO cannot tell from a group that ties in both: (1, 0) and (0, 2) make a reward of 1."""
    parts = {
        "right": np.array([[1.0, 0.0, 1.0, 0.0], [1.0] * 4]),
        "format": np.array([[0.0, 2.0, 0.0, 0.0]] * 2),
    }
    parts["format"][1] = 0.0
    found = gdpo.estimate(np.ones((2, 4)), parts=parts, weights=WEIGHTS)
    assert found[0].any()
    assert not found[1].any()


def test_parts_that_differ_by_rounding_alone_carry_no_signal() -> None:
    part = {"right": np.array([[0.1 + 0.2, 0.3, 0.3]])}
    assert not gdpo.estimate(np.ones((1, 3)), parts=part, weights={"right": 1.0}).any()


def test_an_unscored_rollout_disturbs_no_other_and_a_part_that_nobody_gave_adds_nothing() -> None:
    estimate = open_advantage("gdpo", {}, WEIGHTS)
    right = np.array([[1.0, 0.0, 0.0, 1.0]])
    found = estimate(np.array([[1.0, 0.0, 0.0, NAN]]), {"right": right, "other": right})
    assert np.allclose(found, estimate(right[:, :3], {"right": right[:, :3]}).tolist()[0] + [0.0])


def weighed(rewards, *, parts, weights):
    return sum(
        weight * (parts[name] - parts[name].mean(axis=1, keepdims=True)) for name, weight in weights.items()
    )


def only_weights(rewards, *, weights, factor=1.0):
    return factor * len(weights) * (rewards - rewards.mean(axis=1, keepdims=True))


def test_an_advantage_of_ones_own_gets_the_scored_rollouts_of_each_part() -> None:
    rewards = np.array([[1.0, 3.0, NAN], [1.0, 2.0, 3.0]])
    found = open_advantage("tests.plugins.test_gdpo.weighed", {}, {"right": 2.0})(rewards, {"right": rewards})
    assert found.tolist() == [[-2.0, 2.0, 0.0], [-2.0, 0.0, 2.0]]
    found = open_advantage("tests.plugins.test_gdpo.only_weights", {"factor": 0.5}, WEIGHTS)(rewards)
    assert found.tolist() == [[-1.0, 1.0, 0.0], [-1.0, 0.0, 1.0]]


def test_one_that_lets_an_unscored_part_into_a_mean_stops_the_run_and_says_why() -> None:
    estimate = open_advantage("tests.plugins.test_gdpo.weighed", {}, {"right": 2.0})
    with pytest.raises(RunFailedError, match=r"returned nan .* leave NaN"):
        estimate(np.ones((1, 2)), {"right": np.array([[1.0, NAN]])})


def planned(reward: dict, mode: str = "gdpo", **params: object) -> None:
    raw = {"algorithm": {"advantage_mode": mode, "advantage_params": params}, "reward": reward}
    preflight(plan_runs(parse(raw, "c"), "c"), "c")


def test_a_reward_without_parts_is_refused_before_a_run() -> None:
    planned({"reward": "weighted", "params": {"parts": {"match": 1.0}}})
    with pytest.raises(ConfigError, match=r"c \[algorithm\].advantage_mode: 'gdpo' needs the parts"):
        planned({"reward": "match"})
    with pytest.raises(ConfigError, match="'match' has none with a weight; use reward = \"weighted\""):
        planned({"reward": "match"}, "tests.plugins.test_gdpo.only_weights")


def test_each_source_needs_parts_that_are_weighed_alike() -> None:
    def source(task: str, **parts: float) -> dict:
        return {"task": task, "reward": "weighted", "params": {"parts": parts}} if parts else {"task": task}

    def plan(*sources: dict) -> None:
        raw = {"algorithm": {"advantage_mode": "gdpo"}, "data": {"source": [*sources]}}
        preflight(plan_runs(parse(raw, "c"), "c"), "c")

    plan(source("sort", match=1.0), source("addition", match=1.0, partial=0.5))
    with pytest.raises(ConfigError, match="'match' has none with a weight, in source 'addition'; use reward"):
        plan(source("sort", match=1.0), source("addition"))
    with pytest.raises(ConfigError, match=r"two sources weigh the part 'match' differently: 1 and 0.5"):
        plan(source("sort", match=1.0), source("addition", match=0.5))


@pytest.mark.parametrize("key", ["parts", "weights"])
def test_what_it_is_passed_is_no_key_of_its_table(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"advantage_params\].{key}: unknown parameter of 'gdpo'"):
        planned({"reward": "weighted", "params": {"parts": {"match": 1.0}}}, **{key: {}})


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        (
            "{'std': 1.0}",
            r"\[reward\].reward: '.*': part_weights has the part 'std', whose column",
        ),
        ("['right']", r"\[reward\].reward: '.*': part_weights returned \['right'\], not weights by name"),
        ("{'right': 'much'}", "part_weights has 'much' for 'right'; a weight is a finite number"),
        ("{}", "has none with a weight"),
    ],
)
def test_a_reward_of_ones_own_names_its_parts(tmp_path, monkeypatch, weights: str, why: str) -> None:
    name = f"own_parts_{abs(hash(weights))}"
    text = "def score(completion, prompt):\n    return 1.0, {'right': 1.0}\n\n\n"
    (tmp_path / f"{name}.py").write_text(f"{text}def part_weights(params):\n    return {weights}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=why):
        planned({"reward": f"{name}.score"})
