"""Rollouts of several turns: what an environment said is context, and only sampled tokens are trained on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.engines import Drawn
from retrain.backends.numpy import connect
from retrain.backends.numpy.policy import NumpyBackend
from retrain.backends.tinker.wire import ApiLoss, loss_inputs
from retrain.base.rollouts import Given, Loss, NextTurn, Prompt, Rollout, TrainingSample
from retrain.plugins.losses import ppo

ALPHABET = "0123456789<>?"
HOW = Optimization(lr=0.01, entropy_bonus=0.01, kl_coef=0.1, max_grad_norm=1e9)
TURN = Sampling(group_size=1, max_tokens=3, temperature=1.0)
PPO = Loss("ppo", ppo.evaluate)


def policy() -> NumpyBackend:
    return connect(BackendSpec(seed=0, alphabet=ALPHABET, options={"hidden": 16, "dtype": "float64"}))


def two_turns(backend: NumpyBackend) -> list[Rollout]:
    first = [g.rollouts[0] for g in backend.sample([Prompt(n, "?" * n, "") for n in range(8)], TURN)]
    return backend.extend([NextTurn(one, (("user", "<>"),), 3) for one in first], TURN)


def sample(rollout: Rollout, advantage: float = 0.7) -> TrainingSample:
    return TrainingSample(rollout, np.full(len(rollout.tokens), advantage), 0.01)


def apart(rollout: Rollout) -> list[Rollout]:
    """Return the turns of a rollout as rollouts of their own, with what came before as their prompt."""
    (given,) = rollout.given
    said = "".join(rollout.pieces[: given.at])
    prompt = replace(rollout.prompt, text=rollout.prompt.text + said + given.text)
    turns = slice(None, given.at), slice(given.at, None)
    return [
        replace(rollout, prompt=p, tokens=rollout.tokens[turn], logprobs=rollout.logprobs[turn], given=())
        for p, turn in zip((rollout.prompt, prompt), turns, strict=True)
    ]


def test_given_tokens_lie_between_turns():
    rollout = Rollout(Prompt(0, "", ""), "", (1, 9, 2, 9), np.zeros(4), ("",) * 4, truncated=False)
    talked = replace(rollout, given=(Given(2, (7, 8), "x"),))
    assert talked.placed() == ((1, 9, 7, 8, 2, 9), [0, 1, 4, 5])
    assert talked.placed(unread=9) == ((1, 7, 8, 2, 9), [0, 1, 3, 4])
    assert (talked.length, rollout.length) == (6, 4)
    assert rollout.placed(unread=9) == (rollout.tokens, range(4))


def test_a_turn_keeps_every_token_before_it():
    backend = policy()
    (first,) = backend.sample([Prompt(0, "?", "")], TURN)[0].rollouts
    second = backend.extend([NextTurn(first, (("user", "<"), ("user", "3")), 2)], TURN)[0]
    third = backend.extend([NextTurn(second, (("user", ">"),), 1)], TURN)[0]
    assert third.tokens[: len(first.tokens)] == first.tokens
    assert [given.text for given in third.given] == ["<3", ">"]
    assert [given.at for given in third.given] == [len(first.tokens), len(second.tokens)]
    assert len(third.tokens) == len(second.tokens) + 1 == len(third.logprobs) == len(third.pieces)


def test_a_rollout_trains_like_its_turns_apart():
    whole, parts = policy(), policy()
    rollouts = two_turns(whole)
    stats = whole.update([sample(one) for one in rollouts], PPO, HOW)
    expected = parts.update([sample(turn) for one in rollouts for turn in apart(one)], PPO, HOW)
    assert np.allclose(whole.weights.flat, parts.weights.flat, rtol=0, atol=1e-12)
    assert np.isclose([stats.loss, stats.entropy], [expected.loss, expected.entropy]).all()


def test_a_completion_of_more_tokens_than_wanted_is_cut():
    drawn = Drawn((1, 2, 3), np.array([-1.0, -2.0, -3.0]), 0.5, ended=True)
    first = drawn.cut(2)
    assert (first.tokens, first.logprobs.tolist(), first.ended) == ((1, 2), [-1.0, -2.0], False)
    assert np.isnan(first.entropy)  # only that of all three is known
    assert drawn.cut(3) is drawn


def test_sampled_log_probabilities_are_those_of_training():
    backend = policy()
    rollouts = two_turns(backend)
    stats = backend.update([sample(one) for one in rollouts], PPO, replace(HOW, entropy_bonus=0, kl_coef=0))
    tokens = sum(len(one.tokens) for one in rollouts)
    assert stats.loss == pytest.approx(-0.7 * 0.01 * tokens)  # all ratios are 1


def test_the_api_gets_no_advantage_for_given_tokens():
    rollout = Rollout(Prompt(0, "", ""), "", (1, 2), np.array([-1.0, -2.0]), ("a", "b"), truncated=False)
    talked = replace(rollout, given=(Given(1, (7, 8), "x"),))
    inputs = loss_inputs((5, 6), sample(talked, 100.0), ApiLoss("ppo", {}))
    assert inputs["target_tokens"].tolist() == [6, 1, 7, 8, 2]
    assert inputs["advantages"].tolist() == [0, 1, 0, 0, 1]
    assert inputs["logprobs"].tolist() == [0, -1, 0, 0, -2]
