"""Token transforms: hand-calculated weights, schedules, phrases and edge cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.base import registry
from retrain.base.rollouts import Given, Prompt, Rollout
from retrain.plugins.transforms import gtpo, gtpo_hicra, gtpo_sepa, none
from retrain.plugins.transforms.gtpo_hicra import PHRASES, planning_mask


def rollout_of(pieces, logprobs=None):
    logprobs = -np.ones(len(pieces)) if logprobs is None else np.asarray(logprobs, dtype=float)
    tokens = tuple(range(len(pieces)))
    return Rollout(Prompt(0, "p", "a"), "".join(pieces), tokens, logprobs, tuple(pieces), truncated=False)


def planning(pieces, phrases=PHRASES):
    return [
        piece
        for piece, is_planning in zip(pieces, planning_mask(rollout_of(pieces), phrases), strict=True)
        if is_planning
    ]


WORDS = rollout_of(["wait", " 1", " 2", " 3"], [-4.0, -1.0, -2.0, -1.0])


def test_no_transform_repeats_the_advantage():
    assert np.array_equal(none.reweigh(WORDS, 2.0, 0.5), [2, 2, 2, 2])


def test_gtpo_weighs_by_surprisal_over_its_mean():
    assert np.allclose(gtpo.reweigh(WORDS, 1.0, 0.0), [1.1, 0.95, 1.0, 0.95])


def test_gtpo_weights_never_turn_an_advantage_round():
    assert np.allclose(gtpo.reweigh(WORDS, -1.0, 0.0, beta=5.0), [-6.0, 0.0, -1.0, 0.0])


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=30), st.floats(0, 1))
def test_gtpo_keeps_the_rollouts_total_advantage_while_beta_is_at_most_one(logprobs, beta):
    advantages = gtpo.reweigh(rollout_of(["x"] * len(logprobs), logprobs), 3.0, 0.0, beta=beta)
    assert np.isclose(advantages.mean(), 3.0)


def test_sepa_pools_execution_tokens_and_leaves_planning_tokens():
    u = np.array([4.0, 4 / 3, 4 / 3, 4 / 3])
    expected = 1 + 0.1 * (u / 2 - 1)
    assert np.allclose(gtpo_sepa.reweigh(WORDS, 1.0, 1.0), expected)


def test_sepa_is_gtpo_before_its_delay_has_passed():
    assert np.allclose(gtpo_sepa.reweigh(WORDS, 1.0, 0.09), gtpo.reweigh(WORDS, 1.0, 0.09))


@pytest.mark.parametrize(("progress", "strength"), [(0, 0), (0.2, 0), (0.4, 0.25), (0.6, 0.5), (1, 0.5)])
def test_sepas_pooling_ramps_linearly_after_its_delay(progress, strength):
    assert gtpo_sepa.pooling(progress, 0.5, 0.2, 0.4) == pytest.approx(strength)


def test_a_ramp_of_no_length_is_a_jump():
    assert [gtpo_sepa.pooling(p, 1.0, 0.5, 0.0) for p in (0.49, 0.5)] == [0.0, 1.0]


def test_sepa_leaves_a_rollout_of_planning_tokens_only():
    rollout = rollout_of(["wait", " wait"], [-1.0, -3.0])
    assert np.allclose(gtpo_sepa.reweigh(rollout, 1.0, 1.0), gtpo.reweigh(rollout, 1.0, 1.0))


def test_hicra_amplifies_rewards_of_planning_tokens():
    assert np.allclose(gtpo_hicra.reweigh(WORDS, 1.0, 0.0), [1.1 * 1.2, 0.95, 1.0, 0.95])


def test_hicra_dampens_penalties_of_planning_tokens():
    assert np.allclose(gtpo_hicra.reweigh(WORDS, -1.0, 0.0), [-1.1 * 0.8, -0.95, -1.0, -0.95])


def test_a_phrase_may_span_tokens_and_start_inside_one():
    assert planning(["Now,", " LET", "\n me", " add"], ["let me"]) == [" LET", "\n me"]


def test_phrases_match_whole_words_only():
    assert planning(["also", " reason", " so", "!"], ["so"]) == [" so"]


def test_overlapping_phrases_all_count():
    assert planning(["let", " me", " check"], ["let me", "me check"]) == ["let", " me", " check"]


def test_of_phrases_that_start_alike_the_longest_counts():
    assert planning(["let", " me", " check"], ["let me", "let me check"]) == ["let", " me", " check"]


def test_a_phrase_ends_with_its_turn():
    pieces = ["let", " me", " check", "wa", "it"]
    talked = replace(
        rollout_of(pieces), given=(Given(1, (7,), "?"), Given(3, (7,), "!"), Given(4, (7,), "."))
    )
    assert list(planning_mask(talked, ["let me", "check", "wait"])) == [False, False, True, False, False]


def test_without_phrases_nothing_is_planning():
    assert planning(["wait"], []) == []


def test_tokens_without_text_are_not_planning():
    assert list(planning_mask(rollout_of(["let", "", " me"]), ["let me"])) == [True, False, True]


def test_phrases_are_texts_not_patterns():
    assert planning(["a.c", " abc"], ["a.c"]) == ["a.c"]


def test_characters_are_tokens_too():
    assert planning(list("1 so 2"), ["so"]) == ["s", "o"]


@pytest.mark.parametrize("name", registry.names("transforms"))
def test_an_empty_rollout_gives_no_advantages(name):
    assert registry.find_plugin("transforms", name)(rollout_of([]), 1.0, 0.5).shape == (0,)


@pytest.mark.parametrize("name", ["none", "gtpo", "gtpo_sepa"])
def test_certain_tokens_keep_the_rollouts_advantage(name):
    advantages = registry.find_plugin("transforms", name)(rollout_of(["wait", " 1"], [0.0, 1e-9]), 2.0, 0.5)
    assert np.array_equal(advantages, [2, 2])
