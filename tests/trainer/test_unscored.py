"""Unscored rollouts are in no mean, no spread, no count and no gradient, whatever the advantage."""

import inspect
import json
import re
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from retrain.base.errors import EXIT_INFRASTRUCTURE, RunFailedError
from retrain.base.rollouts import Group, Prompt, Rollout
from retrain.cli.render.status import warnings
from retrain.config.load import parse
from retrain.plugins.advantages import grpo, maxrl, over_batch, rloo
from retrain.plugins.rewards import Outcome, Score
from retrain.records.metrics import read_metrics
from retrain.records.run_row import RunEntry, read_run
from retrain.records.run_state import read_done
from retrain.results.report.gather import gather
from retrain.trainer import worker
from retrain.trainer.batch import BoundAlgorithm, ScoredBatch, open_advantage
from retrain.trainer.signs import UnscoredCount
from tests.stopping import StopAfterStep
from tests.trainer.test_trainer import make_run, with_

NAN = np.nan


def own(rewards, *, power=1.0):
    """An advantage of a user's, as the documentation shows it."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return np.sign(centred) * np.abs(centred) ** power + np.sum(np.ones(rewards.shape[1])) * centred


@over_batch
def own_over_batch(rewards):
    return (rewards - np.nanmean(rewards)) / max(np.count_nonzero(~np.isnan(rewards)), 1)


@over_batch
def careless(rewards):
    return rewards - rewards.mean()


def flat(rewards):
    return rewards.ravel()


BY_GROUP = [
    ("grpo", {}),
    ("grpo", {"scale": True}),
    ("rloo", {}),
    ("maxrl", {}),
    ("reinforce_pp", {"baseline": "group"}),
    ("tests.trainer.test_unscored.own", {"power": 0.5}),
]
EVERY = [*BY_GROUP, ("reinforce_pp", {}), ("tests.trainer.test_unscored.own_over_batch", {})]
batches = arrays(float, (4, 5), elements=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
masks = arrays(bool, (4, 5))


@pytest.mark.parametrize(("name", "params"), EVERY)
@settings(max_examples=40)
@given(rewards=batches, count=st.integers(2, 5))
def test_with_k_unscored_a_group_is_estimated_as_if_it_had_k_fewer(name, params, rewards, count):
    estimate = open_advantage(name, params)
    without = estimate(rewards[:, :count])
    found = estimate(np.hstack([rewards[:, :count], np.full((4, 5 - count), NAN)]))
    assert np.allclose(found[:, :count], without, rtol=1e-12, atol=1e-12)
    assert not found[:, count:].any()


@pytest.mark.parametrize(("name", "params"), [p for p in BY_GROUP if p[0] != "reinforce_pp"])
@settings(max_examples=40)
@given(rewards=batches, unscored=masks)
def test_each_group_is_estimated_from_its_own_scored_rollouts(name, params, rewards, unscored):
    estimate = open_advantage(name, params)
    found = estimate(np.where(unscored, NAN, rewards))
    for row, missing, advantages in zip(rewards, unscored, found, strict=True):
        known = row[~missing]
        wanted = estimate(known[None])[0] if len(known) > 1 else np.zeros(len(known))
        assert np.allclose(advantages[~missing], wanted, rtol=1e-12, atol=1e-12)
        assert not advantages[missing].any()


@pytest.mark.parametrize("baseline", ["batch", "group"])
@settings(max_examples=40)
@given(rewards=batches, unscored=masks, other=st.floats(0, 1))
def test_a_whole_batch_is_normalised_over_its_scored_rollouts(baseline, rewards, unscored, other):
    found = open_advantage("reinforce_pp", {"baseline": baseline})(np.where(unscored, NAN, rewards))
    known = found[~unscored]
    assert not found[unscored].any()
    if known.any():
        assert np.isclose(known.mean(), 0, atol=1e-9)
        assert np.isclose(known.std(), 1)


@pytest.mark.parametrize(("name", "params"), EVERY)
def test_a_group_of_which_nothing_is_scored_teaches_nothing_and_disturbs_nobody(name, params):
    estimate = open_advantage(name, params)
    rewards = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    found = estimate(np.vstack([rewards, np.full((1, 3), NAN)]))
    assert np.allclose(found[:2], estimate(rewards))
    assert not found[2].any()


def test_a_single_scored_rollout_has_no_baseline_and_no_advantage():
    for function in (grpo, rloo, maxrl):
        name = function.__name__.rpartition(".")[2]
        assert not open_advantage(name, {})(np.array([[1.0, NAN], [NAN, 0.0]])).any()


def test_a_mean_that_an_unscored_reward_got_into_stops_the_run_and_says_why():
    estimate = open_advantage("tests.trainer.test_unscored.careless", {})
    with pytest.raises(RunFailedError, match=r"careless' returned nan .* leave NaN rewards"):
        estimate(np.array([[1.0, NAN]]))


def test_advantages_of_another_shape_are_refused_with_both_shapes():
    with pytest.raises(RunFailedError, match=r"flat' returned shape \(2,\) .* shape \(1, 2\)"):
        open_advantage("tests.trainer.test_unscored.flat", {})(np.array([[1.0, 0.0]]))


def batch_of(rewards):
    prompt = Prompt(0, "?", "")

    def rollout(tokens):
        return Rollout(prompt, "", (1,) * tokens, np.zeros(tokens), ("",) * tokens, truncated=False)

    rows = np.array(rewards)
    return ScoredBatch(
        [Group(prompt, tuple(rollout(2 + i) for i in range(rows.shape[1]))) for _ in rows], rows
    )


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_an_unscored_rollout_is_in_no_denominator(normalization):
    raw = {"algorithm": {"loss_normalization": normalization, "advantage_mode": "grpo"}}
    algorithm = BoundAlgorithm(parse(raw, "c"), lambda groups, step: batch_of([[]]))
    weights = []
    for batch in (batch_of([[1.0, 0.0, NAN]]), batch_of([[1.0, 0.0]])):
        samples = algorithm.transform(batch, algorithm.estimate(batch), 0.0)
        weights.append([(len(s.rollout.tokens), s.token_weight, s.advantages.tolist()) for s in samples])
    assert weights[0] == weights[1]


def judge_away(completion, prompt, *, outage):
    from retrain.plugins.rewards import UnscoredError

    if outage and len(completion) % 2:
        raise UnscoredError("no answer")
    return float(len(completion) % 2 == 0)


def outage(directory, **algorithm):
    raw = with_("reward", reward="tests.trainer.test_unscored.judge_away", params={"outage": True})
    return make_run(directory, raw | {"algorithm": algorithm} if algorithm else raw)


def test_status_and_report_name_the_share_without_a_score_and_the_first_reason(tmp_path):
    """Over the whole run, also where a stop cut it in two."""
    files = outage(tmp_path / "r")
    worker.run(files.directory, StopAfterStep(files, 3))
    assert worker.run(files.directory, threading.Event()) == 0
    rows = read_metrics(files.directory)  # all of the same size
    share = np.mean([row["reward_error_fraction"] for row in rows])
    lines, first = inspect.getsourcelines(judge_away)
    line = first + next(i for i, text in enumerate(lines) if "raise" in text)
    row = read_run(RunEntry("r", "a", 0, 6), files).row
    assert 0 < share < 1
    assert row.unscored_fraction == pytest.approx(share)
    assert row.unscored_reason.endswith(f"test_unscored.py:{line}: UnscoredError: no answer")
    why = ": the reward cannot judge them"
    told = f"{100 * share:.3g} % of completions have no score{why}; the first: {row.unscored_reason}"
    assert [str(line) for line in warnings([row])] == [f"r: {told}"]
    assert gather(files.directory).problems == (f"maxrl_s5: {told}",)


def test_a_run_whose_completions_all_have_a_score_says_nothing(tmp_path):
    files = make_run(tmp_path / "r", with_("training", max_steps=1))
    assert worker.run(files.directory, threading.Event()) == 0
    row = read_run(RunEntry("r", "a", 0, 6), files).row
    assert (row.unscored_fraction, list(warnings([row]))) == (None, [])
    assert gather(files.directory).problems == ()


def unscored_in(rewards, reason="", *, is_unjudged=False):
    score = Score(None, Outcome.ERROR, reason, is_unjudged=is_unjudged)
    return {number: score for number, reward in enumerate(rewards) if np.isnan(reward)}


def test_only_outages_in_ten_steps_in_a_row_end_a_run():
    def step(*rewards, is_unjudged=False):
        unscored = unscored_in(rewards, "503", is_unjudged=is_unjudged)
        return ScoredBatch([], np.array([rewards]), marked=unscored)

    count = UnscoredCount(max_unscored=0.5)
    for steps, batch in (
        (20, step(NAN, NAN, 1.0, is_unjudged=True)),
        (9, step(NAN, NAN, 1.0)),
        (1, step(NAN, 1.0)),  # half of them is not more than half
        (9, step(NAN, NAN, 1.0)),
    ):
        for _ in range(steps):
            found = count.add(batch)
            assert count.outage() is None
    assert found.fraction == pytest.approx((40 + 18 + 1 + 18) / (60 + 27 + 2 + 27))
    assert found.outage_fraction == pytest.approx((18 + 1 + 18) / (60 + 27 + 2 + 27))
    resumed = UnscoredCount(max_unscored=0.5)
    resumed.load_state_dict(json.loads(json.dumps(count.state_dict())))
    resumed.add(step(NAN, NAN, 1.0))
    why = r"more than 50% .* last 10 steps .*max_unscored.*: 503"
    assert re.search(why, str(resumed.outage()))
    resumed.add(step(1.0, 1.0))
    assert resumed.outage() is None


def away_after(completion, prompt, *, steps):
    """Scores no completion but the first of each step, once some steps are over."""
    away_after.calls += 1
    if away_after.calls > 6 * steps and away_after.calls % 6:
        raise TimeoutError("no answer")
    return float(len(completion) % 2 == 0)


away_after.calls = 0


def test_a_run_whose_judge_is_away_ends_as_infrastructure_and_goes_on_when_it_is_back(tmp_path):
    raw = with_("reward", reward="tests.trainer.test_unscored.away_after", params={"steps": 2})
    sizes = {"max_steps": 20, "batch_size": 2, "group_size": 3, "save_every": 0}
    raw |= with_("training", **sizes, eval_at_start=False) | {"reward": raw["reward"]}
    files = make_run(tmp_path / "r", raw)
    away_after.calls = 0
    assert worker.run(files.directory, threading.Event()) == EXIT_INFRASTRUCTURE
    last = read_metrics(files.directory)[-1]
    assert (last["step"], last["unscored_fraction"]) == (12, last["unscored_outage_fraction"])
    row = read_run(RunEntry("r", "a", 0, 20), files).row
    assert row.state == "infrastructure"
    assert "for more than 50% of the completions in each of the last 10 steps" in row.message
    assert "the scorer failed or timed out; the first:" in row.unscored
    away_after.calls = -(10**6)
    assert worker.run(files.directory, threading.Event()) == 0
    assert [row["attempt"] for row in read_metrics(files.directory)] == [1] * 12 + [2] * 8


def judges_none(completion, prompt, *, error):
    from retrain.plugins.rewards import UnscoredError

    raise {"unjudged": UnscoredError, "late": TimeoutError}[error](error)


def judged_by_none(directory, error, **tables):
    reward = {"reward": "tests.trainer.test_unscored.judges_none", "params": {"error": error}}
    training = with_("training", max_steps=12, eval_at_start=False)
    return make_run(directory, {**training, "reward": reward, **tables})


def test_a_step_without_any_score_by_an_outage_says_that_another_attempt_may_help(tmp_path):
    files = judged_by_none(tmp_path / "r", "late")
    assert worker.run(files.directory, threading.Event()) == EXIT_INFRASTRUCTURE
    row = read_run(RunEntry("r", "a", 0, 6), files).row
    assert row.state == "infrastructure"
    assert "the scorer failed or timed out for 12 of them; " in row.message
    assert read_metrics(files.directory) == []


@pytest.mark.parametrize(("name", "params"), EVERY)
def test_a_step_of_which_nothing_can_be_judged_is_a_row_without_a_gradient(tmp_path, name, params):
    how = {"advantage_mode": name, "advantage_params": params}
    files = judged_by_none(tmp_path / "r", "unjudged", algorithm=how)
    assert worker.run(files.directory, threading.Event()) == 0
    rows = read_metrics(files.directory)
    assert [row["step"] for row in rows] == [*range(1, 13)]
    for row in rows:
        assert row["mean_reward"] is row["reward_std"] is row["correct_rate"] is None
        assert (row["grad_norm"], row["updates"], row["zero_signal_group_fraction"]) == (0.0, 0, 1.0)
        assert (row["unscored_fraction"], row["unscored_outage_fraction"]) == (1.0, 0.0)
    row = read_run(RunEntry("r", "a", 0, 12), files).row
    told = [str(line) for line in warnings([row])]
    assert told[0].startswith("r: 100 % of completions have no score: the reward cannot judge them; ")
    assert told[1] == (
        "r: no learning signal in steps 1 to 12: the reward can judge no completion; correct it, or use "
        "prompts that it can judge"
    )


def test_an_evaluation_of_which_nothing_can_be_judged_has_no_value_and_says_so(tmp_path):
    raw = {"data": {"task": "successor", "eval_prompts": 2, "eval_samples": 2}}
    raw |= {
        "eval": [
            {"name": "other", "task": "successor", "prompts": 2, "samples": 2, "temperature": 1.0, "every": 4}
        ]
    }
    training = with_("training", max_steps=4, eval_every=4)["training"]
    files = judged_by_none(tmp_path / "r", "unjudged", training=training, **raw)
    assert worker.run(files.directory, threading.Event()) == 0
    row, result = read_metrics(files.directory)[-1], read_done(files.done).result
    for name in ("eval", "eval_other"):
        for key in ("reward", "correct_rate", "pass_at_2"):
            assert row[f"{name}_{key}"] is result[f"{name}_{key}"] is None
        assert row[f"{name}_unscored_fraction"] == result[f"{name}_unscored_fraction"] == 1.0


def test_a_checkpoint_keeps_the_first_reason():
    def step(rewards, reason=""):
        return ScoredBatch([], np.array([rewards]), marked=unscored_in(rewards, reason))

    count = UnscoredCount()
    assert count.add(step([1.0, 0.0, 0.0])) is None
    assert count.add(step([1.0, NAN, 0.0], "503\x07 from the judge")).fraction == pytest.approx(1 / 6)
    resumed = UnscoredCount()
    resumed.load_state_dict(json.loads(json.dumps(count.state_dict())))
    found = resumed.add(step([NAN, NAN, 1.0], "another"))
    assert (found.fraction, found.reason) == (pytest.approx(3 / 9), "503 from the judge")


@pytest.mark.parametrize("baseline", ["batch", "group"])
def test_an_outage_of_the_judge_is_no_punishment(tmp_path, baseline):
    """Only completions of even length are scored, all with 1: nothing differs, so nothing is learned."""
    how = {"advantage_mode": "reinforce_pp", "advantage_params": {"baseline": baseline}}
    files = outage(tmp_path / "r", **how)
    assert worker.run(files.directory, threading.Event()) == 0
    rows = read_metrics(files.directory)
    assert any(row["reward_error_fraction"] > 0 for row in rows)
    assert {row["grad_norm"] for row in rows} == {0.0}
