"""What a report tells of back pressure: the fit, the regimes, and the optimum that was steered to."""

from __future__ import annotations

import math

import pytest

from retrain.results.report.back_pressure import Stretch, regime_stretches, scalability
from tests.simulated import Row, Simulated, flat, side


def steered(p_star: float | None = 64.0) -> Simulated:
    """Ten steps of warm-up, ten more, throughputs on a curve with lambda 100, sigma 0.02, kappa 0.0002."""

    def more(step: int) -> Row:
        p = 8 * step
        rate = 100 * p / (1 + 0.02 * (p - 1) + 0.0002 * p * (p - 1))
        regime = "warmup" if step <= 10 else "optimal"
        row = {"batch_size": step, "group_size": 8, "tokens_per_second": rate}
        return row | {"bp_regime": regime, "bp_p_star": p_star}

    return Simulated([0.5] * 20, more=more)


def test_the_fit_finds_the_curve_that_the_steps_lie_on(tmp_path):
    found = scalability(side(tmp_path, steered(), steered()))
    assert found is not None
    assert (found.fit.lambda_, found.fit.sigma, found.fit.kappa) == pytest.approx(
        (100, 0.02, 0.0002), rel=1e-3
    )
    assert found.fit.p_star == pytest.approx(math.sqrt(0.98 / 0.0002), rel=1e-3)
    assert found.steered_p_star == 64.0


@pytest.mark.parametrize(("unlimited", "median"), [(1, 64.0), (2, None)])
def test_the_controllers_last_optimum_is_none_where_half_the_seeds_saw_none(tmp_path, unlimited, median):
    found = scalability(side(tmp_path, *[steered()] * 2, *[steered(None)] * unlimited))
    assert found is not None
    assert found.steered_p_star == median


def test_runs_without_back_pressure_have_no_fit(tmp_path):
    assert scalability(side(tmp_path, flat(0.5))) is None


def test_regimes_are_joined_into_stretches(tmp_path):
    found = regime_stretches(side(tmp_path, steered()).runs)
    assert found == (Stretch("grpo_s0", "warmup", 1, 10), Stretch("grpo_s0", "optimal", 11, 20))
