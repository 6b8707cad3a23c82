"""Numbers here are worked by hand, from textbooks, or from scipy called another way."""

from __future__ import annotations

import numpy as np
import pytest
import scipy  # which imports its parts when they are used
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.control.rules.sequential import SequentialComparison
from retrain.plan.decidable import Finding
from retrain.results.report.statistics import describe_sample, difference_of, holm, interquartile_mean


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def test_pairs_are_judged_by_their_gains():
    found = difference_of(seeds(1, 5, 3), seeds(2, 7, 6))  # gains 1, 2, 3: mean 2, deviation 1
    half = 4.302653 / np.sqrt(3)  # t table, 2 degrees of freedom, 97.5 %
    assert found.n == 3
    assert found.difference == 2
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half), abs=1e-5)


def test_seeds_that_do_not_match_are_judged_by_welch():
    a, b = [20.1, 22.4, 19.8, 21.0], [25.0, 31.2, 22.8]
    found = difference_of(dict(enumerate(a)), dict(enumerate(b, 100)))
    error = np.sqrt(np.var(a, ddof=1) / 4 + np.var(b, ddof=1) / 3)
    t = (np.mean(b) - np.mean(a)) / error
    freedom = error**4 / ((np.var(a, ddof=1) / 4) ** 2 / 3 + (np.var(b, ddof=1) / 3) ** 2 / 2)
    assert found.n is None
    assert found.p == pytest.approx(2 * scipy.stats.t.sf(t, freedom))
    assert found.low == pytest.approx(np.mean(b) - np.mean(a) - scipy.stats.t.ppf(0.975, freedom) * error)


def test_a_seed_without_partner_does_not_undo_the_pairing():
    found = difference_of(seeds(1, 2, 3, 9), seeds(2, 4, 6))
    assert (found.n, found.difference) == (3, 2.0)


def test_seeds_of_which_few_match_are_not_paired():
    found = difference_of({0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}, {3: 1.0, 4: 2.0, 5: 3.0, 6: 4.0})
    assert (found.n, found.difference) == (None, 0.0)


@pytest.mark.parametrize(("first", "second"), [([1, 2], [3, 9]), ([1, 2, 3], [4]), ([], [1, 2, 3])])
def test_fewer_than_three_seeds_have_no_interval(first, second):
    found = difference_of(seeds(*first), {seed + 50: float(x) for seed, x in enumerate(second)})
    assert (found.low, found.p, found.bootstrap_low, found.detectable) == (None, None, None, None)


@pytest.mark.parametrize(("n", "p"), [(3, 0.25), (6, 2 / 2**6)])
def test_equal_gains_are_judged_by_all_changes_of_sign(n, p):
    found = difference_of(seeds(*range(n)), seeds(*(x + 0.5 for x in range(n))))
    assert found.p == pytest.approx(p)


def test_two_constants_are_judged_by_all_permutations():
    found = difference_of({i: 0.5 for i in range(4)}, {i: 1.0 for i in range(10, 14)})
    assert found.p == pytest.approx(2 / 70)  # 8 choose 4 ways, two of which are as far apart


def test_identical_runs_do_not_differ_at_all():
    found = difference_of(seeds(0.1, 0.5, 0.9), seeds(0.1, 0.5, 0.9))
    assert (found.difference, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)


def test_the_interquartile_mean_is_that_of_the_middle_half():
    assert interquartile_mean(np.array([1.0, 2, 3, 4, 5, 6, 7, 800])) == 4.5
    assert interquartile_mean(np.array([0.0, 1, 2])) == 1.0


def test_the_chance_of_improvement_counts_ties_half():
    assert difference_of(seeds(1, 2, 3), seeds(4, 5, 6)).improvement == 1.0
    assert difference_of(seeds(1, 2), seeds(2, 1)).improvement == 0.5
    assert difference_of(seeds(1, 1, 1), seeds(1, 1, 2)).improvement == pytest.approx((6 * 0.5 + 3) / 9)


def test_the_chance_of_improvement_is_mann_whitneys_statistic():
    a, b = np.random.default_rng(0).normal(size=(2, 9)).round(1)
    u = scipy.stats.mannwhitneyu(b, a).statistic
    assert difference_of(seeds(*a), seeds(*b)).improvement == pytest.approx(u / 81)


def test_several_comparisons_are_adjusted_as_holm_did():
    assert holm([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx([0.03, 0.06, None, 0.06, 0.02])


def test_the_detectable_difference_is_found_four_times_in_five():
    n, spread = 5, 1.0
    samples = np.random.default_rng(1).normal(size=(4000, n)) * spread
    exact = samples / samples.std(axis=1, ddof=1, keepdims=True)  # the spread that was planned with
    found = difference_of(seeds(*np.zeros(n)), seeds(*exact[0]))
    assert found.detectable is not None
    p = scipy.stats.ttest_1samp(samples + found.detectable, 0.0, axis=1).pvalue
    assert np.mean(p < 0.05) == pytest.approx(0.8, abs=0.05)


def test_the_bootstrap_interval_is_that_of_all_resamples_where_those_can_be_counted():
    gains = np.array([0.11, 0.24, 0.35, 0.18, 0.29, 0.21])
    every = gains[np.stack(np.meshgrid(*[np.arange(6)] * 6), -1).reshape(-1, 6)].mean(axis=1)
    jackknife = np.array([np.delete(gains, i).mean() for i in range(6)])
    off = jackknife.mean() - jackknife
    skew = (off**3).sum() / (6 * (off**2).sum() ** 1.5)
    bias = scipy.stats.norm.ppf(np.mean(every < gains.mean()) + np.mean(every == gains.mean()) / 2)
    edges = bias + (bias + scipy.stats.norm.ppf([0.025, 0.975])) / (
        1 - skew * (bias + scipy.stats.norm.ppf([0.025, 0.975]))
    )
    found = difference_of(seeds(*np.zeros(6)), seeds(*gains))
    exact = np.quantile(every, scipy.stats.norm.cdf(edges))
    assert (found.bootstrap_low, found.bootstrap_high) == pytest.approx(exact, abs=0.005)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=6), st.floats(-1e3, 1e3))
def test_comparing_is_blind_to_a_common_shift_and_sees_a_real_one(values, shift):
    first = dict(enumerate(values))
    moved = {seed: value + shift for seed, value in first.items()}
    found = difference_of(first, moved)
    assert found.difference == pytest.approx(shift, abs=1e-6)
    assert found.p is not None
    assert 0 <= found.p <= 1


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("paired", [True, False])
def test_identical_conditions_are_told_apart_in_one_case_of_twenty(n, paired):
    rng, tries = np.random.default_rng(7), 200
    draws = -rng.lognormal(size=(tries, 2, n))  # most near the top, now and then a collapse
    p = [difference_of(seeds(*a), seeds(*b), paired=paired).p for a, b in draws]
    assert np.mean(np.array(p) < 0.05) <= scipy.stats.binom.ppf(0.999, tries, 0.05) / tries


def test_a_mean_has_an_interval_from_three_seeds_on():
    half = 4.302653 / np.sqrt(3)
    found = describe_sample([1, 2, 3])
    assert (found.n, found.mean, found.std) == (3, 2.0, 1.0)
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half), abs=1e-5)
    assert describe_sample([1, 2]).low is None
    assert describe_sample([]).mean is None


def test_an_interval_of_a_decision_that_gave_up_is_that_of_compare():
    first, second = [0.31, 0.42, 0.37, 0.29], [0.33, 0.41, 0.36, 0.31]
    comparison = SequentialComparison(max_seeds=30)
    look = comparison.look(second, first)
    pairs = list(zip(second, first, strict=True))
    decided = Finding("b", look.verdict, pairs, look, comparison).described()
    compared = difference_of(seeds(*first), seeds(*second))
    assert (decided.low, decided.high) == (None, None)
    assert (decided.alone_low, decided.alone_high) == pytest.approx((compared.low, compared.high), rel=1e-12)
