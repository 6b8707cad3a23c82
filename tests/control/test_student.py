"""Quantiles of Student's t, against published tables and closed forms."""

from __future__ import annotations

import math

import pytest

from retrain.control.rules.student import half_width, t_quantile

TABLE = {  # degrees of freedom: 97.5 % and 99.5 %
    1: (12.7062047, 63.6567412),
    2: (4.3026527, 9.9248432),
    3: (3.1824463, 5.8409093),
    4: (2.7764451, 4.6040949),
    5: (2.5705818, 4.0321430),
    10: (2.2281389, 3.1692727),
    20: (2.0859634, 2.8453397),
    30: (2.0422725, 2.7499957),
    60: (2.0002978, 2.6602830),
    120: (1.9799304, 2.6174211),
    math.inf: (1.9599640, 2.5758293),
}


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_tables(freedom):
    quantiles = [t_quantile(probability, freedom) for probability in (0.975, 0.995)]
    assert quantiles == pytest.approx(TABLE[freedom], rel=1e-7)


@pytest.mark.parametrize("tail", [0.4999, 0.2, 0.01, 1e-6, 1e-12])
def test_quantiles_of_one_and_two_degrees_have_a_closed_form(tail):
    assert t_quantile(tail, 1) == pytest.approx(-1 / math.tan(math.pi * tail), rel=1e-9)
    exact = (2 * tail - 1) / math.sqrt(2 * tail * (1 - tail))
    assert t_quantile(tail, 2) == pytest.approx(exact, rel=1e-9)


def test_quantiles_are_symmetric_and_rise_through_zero():
    assert t_quantile(0.5, 7.3) == 0
    assert t_quantile(0.975, 7.3) == pytest.approx(-t_quantile(0.025, 7.3))


@pytest.mark.parametrize("probability", [0.6, 0.975, 0.9999])
def test_the_expansion_for_many_degrees_goes_on_where_the_fraction_ends(probability):
    below, above = t_quantile(probability, 10_000), t_quantile(probability, 10_001)
    assert 0 < below - above < 2e-7


def test_an_interval_of_three_differences_is_as_by_hand():
    assert half_width([1.0, 2.0, 3.0], 0.05) == pytest.approx(4.3026527 / math.sqrt(3), rel=1e-7)
