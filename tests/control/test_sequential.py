"""The sequential comparison: exact over signs, steady under what must not matter, right at the edges."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain import SequentialComparison


def verdicts(comparison, d):
    """Return the verdict after each number of seeds up to the first that ends the comparison."""
    found = []
    for k in range(2, len(d) + 1):
        found.append(comparison.look(d[:k], np.zeros(k)).verdict)
        if found[-1] != "continue":
            break
    return found


def rejections(comparison, sizes):
    """Return the share of all patterns of signs of these differences that end "better" or "worse"."""
    patterns = itertools.product((1.0, -1.0), repeat=len(sizes))
    ends = [verdicts(comparison, np.array(signs) * sizes)[-1] for signs in patterns]
    return sum(end in ("better", "worse") for end in ends) / len(ends)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.floats(0, 10), min_size=7, max_size=7)
    | st.lists(st.sampled_from([0.0, 0.3, 0.6]), min_size=7, max_size=7)
)
def test_of_all_signs_of_any_differences_at_most_the_error_rejects(sizes):
    assert rejections(SequentialComparison(max_seeds=7, error=0.1), np.array(sizes)) <= 0.1


def test_a_final_look_before_the_last_seed_keeps_the_error_and_finds_what_the_last_would():
    comparison, sizes = SequentialComparison(max_seeds=12, error=0.1), np.arange(1.0, 8.0)
    patterns = [np.array(signs) * sizes for signs in itertools.product((1.0, -1.0), repeat=7)]
    looks = [[comparison.look(d[:k], np.zeros(k), final=k == 7) for k in range(3, 8)] for d in patterns]
    found = [any(look.verdict in ("better", "worse") for look in each) for each in looks]
    assert np.mean([each[-2].verdict in ("better", "worse") for each in looks]) < 0.05 < np.mean(found) <= 0.1
    low, high = looks[0][-1].interval  # all signs alike
    assert 0 < low < high


def test_an_early_comparison_finds_large_differences_sooner_and_keeps_the_error():
    early, sizes = SequentialComparison(max_seeds=8, error=0.1, early=True), np.arange(4.0, 12.0)
    assert 0.05 < rejections(early, sizes) <= 0.1
    d = np.array([1.0, 3.0, 2.0, 1.0, 3.0, 2.0, 1.0, 3.0])
    assert verdicts(early, d) == ["continue"] * 3 + ["better"]
    assert len(verdicts(SequentialComparison(max_seeds=8, error=0.1), d)) > 4


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=7, max_size=7), st.booleans())
def test_what_is_found_with_less_error_is_found_with_more(sizes, early):
    """As Holm's procedure supposes, which passes on the error of what is found."""
    signs = itertools.product((1.0,), *[(1.0, -1.0)] * 6)  # the opposites are alike
    patterns = [np.array(pattern) * sizes for pattern in signs]
    errors = (0.07, 0.1, 0.2)
    found = [
        {
            i
            for i, d in enumerate(patterns)
            if SequentialComparison(7, error, early=early)
            .look(d, np.zeros(7), later_errors=errors[k + 1 :])
            .verdict
            in ("better", "worse")
        }
        for k, error in enumerate(errors)
    ]
    assert found[0] <= found[1] <= found[2]


def test_what_more_error_would_not_find_is_not_found():
    d = np.array([0.32, -0.29, 0.31, -0.29, 1.29, 1.03, 4.14])
    comparison = SequentialComparison(max_seeds=7, error=0.1)
    assert comparison.look(d, np.zeros(7)).verdict == "better"
    look = comparison.look(d, np.zeros(7), later_errors=[0.2])
    assert look.verdict == "undecided"
    assert look.p_value > 0.1


def test_several_comparisons_share_the_error():
    sizes = np.random.default_rng(0).exponential(size=8)
    assert rejections(SequentialComparison(max_seeds=8, error=0.2, comparisons=4), sizes) <= 0.05


@pytest.mark.parametrize(("shift", "verdict"), [(3.0, "better"), (-3.0, "worse")])
def test_a_large_difference_is_found_with_half_the_seeds(shift, verdict):
    d = np.random.default_rng(1).normal(size=12) + shift
    found = verdicts(SequentialComparison(), d)
    assert found[-1] == verdict
    assert len(found) + 1 <= 7


def test_equal_values_end_early_without_a_difference():
    look = SequentialComparison().look([0.5] * 5, [0.5] * 5)
    assert (look.verdict, look.difference, look.p_value) == ("no_difference", 0.0, 1.0)


def test_a_difference_that_does_not_matter_is_none():
    d = 0.01 + 0.001 * np.random.default_rng(2).normal(size=12)
    assert verdicts(SequentialComparison(), d)[-1] == "better"
    assert verdicts(SequentialComparison(smallest_difference=0.05), d)[-1] == "no_difference"


def test_a_large_uncertain_difference_is_not_called_none():
    d = np.array([1.0, -0.8, 0.9, -0.7, 0.8, -0.6, 0.9, -0.5, 0.7, 0.6, -0.9, 0.5])
    assert verdicts(SequentialComparison(smallest_difference=0.01), d)[-1] == "undecided"
    assert verdicts(SequentialComparison(), d)[-1] == "no_difference"


@pytest.mark.parametrize("spread", [0.0, 1.0, 1e-16, 6e-17, 1e300])
def test_the_interval_of_any_spread_is_found(spread):
    d = 0.3 + spread * np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    look = SequentialComparison(max_seeds=7).look(d, np.full(7, 0.1))
    low, high = look.interval
    assert low <= look.difference <= high


def test_a_bound_is_next_to_what_is_rejected():
    d = np.random.default_rng(7).normal(size=9)
    comparison = SequentialComparison(max_seeds=9)
    low, high = comparison.look(d, np.zeros(9)).interval
    for bound, outside in ((low, -1e-6), (high, 1e-6)):
        assert comparison.look(d - bound - outside, np.zeros(9)).verdict in ("better", "worse")
        assert comparison.look(d - bound + outside, np.zeros(9)).verdict not in ("better", "worse")


def test_rounding_errors_are_no_evidence():
    look = SequentialComparison().look([0.1 + 0.2] * 6, [0.3] * 6)
    assert (look.verdict, look.difference, look.p_value) == ("no_difference", 0.0, 1.0)
    most = SequentialComparison(max_seeds=6).look([0.1 + 0.2] * 5 + [0.4], [0.3] * 6)
    assert most.verdict == "undecided"


def test_a_difference_of_just_the_smallest_that_matters_is_not_called_none():
    look = SequentialComparison(smallest_difference=0.03).look([0.83] * 6, [0.80] * 6)
    assert look.verdict == "better"


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1e308])
def test_values_of_any_size_are_compared(scale):
    d = np.random.default_rng(8).normal(size=8) + 4
    a, b = (
        SequentialComparison().look(d / 4, np.zeros(8)),
        SequentialComparison().look(d / 4 * scale, [0] * 8),
    )
    assert (b.verdict, b.p_value) == (a.verdict, a.p_value) == ("better", a.p_value)
    assert b.interval == pytest.approx(tuple(scale * bound for bound in a.interval))


def test_a_difference_in_the_other_direction_is_not_called_none():
    """Both ends are rejected here, but one of them as if the difference were beyond it."""
    d = np.array([5.0, 5.1, 4.9, 5.0, 5.2, 5.0, -9.9, -9.9, -10.0])
    for k in range(6, 10):
        look = SequentialComparison(max_seeds=9, smallest_difference=1.0).look(d[:k], np.zeros(k))
        assert look.verdict == "better"


def test_one_collapsed_seed_does_not_hide_that_the_others_are_alike():
    d = np.array([0.04, 0.03, -0.07, 0.8, 0.01, 0.01, 0.01, 0.01])
    assert verdicts(SequentialComparison(), d)[-1] == "no_difference"


def test_seeds_that_are_compared_later_too_are_given_up_sooner_and_find_the_same():
    d, comparison = np.array([-0.2, 0.3, 2.2, 1.2, -1.1]), SequentialComparison(comparisons=3)
    assert comparison.look(d, np.zeros(5)).verdict == "continue"
    assert comparison.look(d, np.zeros(5), has_rungs=True).verdict == "no_difference"
    far = 9 + np.append(d, [0.0, 0.1])
    assert verdicts(comparison, far) == ["continue"] * 5 + ["better"]
    assert comparison.look(far, np.zeros(7), has_rungs=True).verdict == "better"


def test_neither_units_nor_order_of_the_conditions_matter():
    rng = np.random.default_rng(3)
    a, b, comparison = rng.normal(0.8, 1, 9), rng.normal(0, 1, 9), SequentialComparison(max_seeds=9)
    look, scaled, swapped = comparison.look(a, b), comparison.look(a * 1e6, b * 1e6), comparison.look(b, a)
    assert look.verdict == scaled.verdict
    assert {look.verdict, swapped.verdict} in ({"better", "worse"}, {"undecided"})
    assert look.p_value == pytest.approx(swapped.p_value)
    assert swapped.interval == pytest.approx((-look.interval[1], -look.interval[0]), rel=1e-3)
    assert scaled.interval == pytest.approx(tuple(1e6 * bound for bound in look.interval), rel=1e-3)


@pytest.mark.parametrize("seed", range(12))
def test_verdict_p_value_and_interval_agree(seed):
    d = np.random.default_rng(seed).normal(size=10) + 0.1 * seed
    comparison = SequentialComparison(max_seeds=10)
    look = comparison.look(d, np.zeros(10))
    is_found = look.verdict in ("better", "worse")
    assert is_found == (look.p_value <= 0.05 * (1 + 1e-5))
    if comparison.look(d[:9], np.zeros(9)).verdict not in (
        "better",
        "worse",
    ):  # found at this look, not before
        assert is_found == (not look.interval[0] < 0 < look.interval[1])
    assert look.interval[0] <= look.difference <= look.interval[1]


def test_a_difference_once_found_stays_found():
    d = np.concatenate([3 + np.random.default_rng(4).normal(size=7), np.full(5, -3.0)])
    comparison = SequentialComparison()
    assert comparison.look(d[:7], np.zeros(7)).verdict == "better"
    assert {comparison.look(d[:k], np.zeros(k)).verdict for k in range(7, 13)} == {"better"}


def test_too_few_seeds_exclude_nothing():
    look = SequentialComparison().look([1.0, 1.1, 1.2], [0.0, 0.0, 0.0])
    assert (look.verdict, look.interval) == ("continue", (-math.inf, math.inf))
    assert look.p_value > 0.05


@pytest.mark.parametrize("seeds", [3, 4, 5])
@pytest.mark.parametrize("noise", [0.0, 0.002, 0.01, 0.1, 0.5])
def test_so_few_seeds_find_nothing_as_their_signs_are_alike_by_chance(seeds, noise):
    """Of equal conditions whose differences are about +-c, one in four has three of one sign."""
    comparison = SequentialComparison(max_seeds=seeds)
    sizes = 1 + noise * np.random.default_rng(5).normal(size=seeds)
    assert rejections(comparison, sizes) == 0
    look = comparison.look(sizes, np.zeros(seeds))
    assert (look.p_value > 0.05, look.interval) == (True, (-math.inf, math.inf))


@pytest.mark.parametrize(
    ("settings", "fewest"),
    [({}, 6), ({"comparisons": 4}, 8), ({"error": 0.0625}, 5), ({"error": 0.25}, 3), ({"error": 0.1}, 5)],
)
def test_it_takes_so_many_seeds_that_equal_signs_are_rare(settings, fewest):
    comparison = SequentialComparison(**settings)
    assert comparison.fewest_seeds == fewest
    d = np.ones(12)
    found = [comparison.look(d[:k], np.zeros(k)).verdict == "better" for k in range(2, fewest + 1)]
    assert found == [False] * (fewest - 2) + [True]


def test_many_seeds_are_compared_by_a_sample_of_signs():
    rng, comparison = np.random.default_rng(6), SequentialComparison(max_seeds=20)
    false = sum(verdicts(comparison, rng.normal(size=20))[-1] in ("better", "worse") for _ in range(40))
    assert false <= 7  # 2 expected; P(more than 7) < 0.1 %
    assert verdicts(comparison, rng.normal(size=20) + 1.5)[-1] == "better"


def test_an_error_too_small_for_a_sample_of_signs_finds_nothing():
    comparison = SequentialComparison(max_seeds=20, error=1e-5)
    assert comparison.fewest_seeds == 18
    d = np.random.default_rng(9).normal(size=20) + 4
    assert verdicts(comparison, d)[-1] == "undecided"
    assert SequentialComparison(error=1e-20).look(d[:3], np.zeros(3)).verdict == "no_difference"


def test_its_state_is_plain_data():
    comparison = SequentialComparison(
        max_seeds=9, error=0.1, smallest_difference=0.2, comparisons=3, early=True
    )
    assert SequentialComparison.from_state_dict(json.loads(json.dumps(comparison.state_dict()))) == comparison


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"max_seeds": 2}, "max_seeds: got 2"),
        ({"max_seeds": 8.0}, "max_seeds: got 8.0"),
        ({"max_seeds": 10**6}, "max_seeds: got 1000000; needs a whole number from 3 to 1000"),
        ({"error": 0.0}, "error: got 0.0"),
        ({"error": 1e-320}, "error: got 1e-320; needs at least 1e-100 and below 1"),
        ({"error": 1.0}, "error: got 1.0"),
        ({"smallest_difference": 0.0}, "smallest_difference: got 0.0"),
        ({"smallest_difference": math.inf}, "smallest_difference: got inf"),
        ({"comparisons": 0}, "comparisons: got 0"),
    ],
)
def test_a_setting_out_of_range_is_named(settings, names):
    with pytest.raises(ValueError, match=names):
        SequentialComparison(**settings)


@pytest.mark.parametrize(
    ("a", "b", "names"),
    [
        ([1.0], [0.0], "seeds: got 1"),
        ([1.0] * 13, [0.0] * 13, "seeds: got 13"),
        ([1.0, 2.0], [0.0], "values of b: got 1"),
        ([1.0, math.nan], [0.0, 0.0], "finite numbers"),
    ],
)
def test_values_that_cannot_be_compared_are_refused(a, b, names):
    with pytest.raises(ValueError, match=names):
        SequentialComparison().look(a, b)
