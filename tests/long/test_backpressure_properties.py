"""What holds for every sequence of steps, however strange."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.control.rules.backpressure import BackPressure, StepObservation

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["recommended", "recommended", "recommended", "chosen", "out of memory"]),
        st.integers(1, 80),
        st.one_of(st.floats(1e-3, 1e9), st.floats(1e-29, 1e29)),
        st.one_of(st.none(), st.floats(0.0, 1.0)),
        st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)),
    ),
    min_size=1,
    max_size=40,
)
BOUNDS = st.tuples(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64)).map(sorted)
OBJECTIVES = st.sampled_from(["throughput", "goodput"])


def observations(controller, steps):
    """Turn drawn steps into observations, one at a time, as the controller's recommendation changes."""
    for kind, batch, throughput, memory, noise_scale in steps:
        size = batch if kind == "chosen" else controller.batch_size
        failed = kind == "out of memory"
        yield StepObservation(size, 8, throughput, 1.0, failed, memory, noise_scale)


@given(steps=STEPS, bounds=BOUNDS, objective=OBJECTIVES)
@settings(max_examples=60, deadline=None)
def test_recommendations_stay_within_the_bounds(steps, bounds, objective):
    lowest, configured, highest = bounds
    keys = {"min_batch_size": lowest, "max_batch_size": highest, "objective": objective}
    controller = BackPressure(configured, 8, **keys)

    assert controller.batch_size == configured
    for step in observations(controller, steps):
        decision = controller.observe(step)
        assert lowest <= decision.batch_size <= highest
        assert decision.batch_size == controller.batch_size


@given(steps=STEPS, bounds=BOUNDS)
@settings(max_examples=60, deadline=None)
def test_a_batch_that_ran_out_of_memory_is_never_recommended_again(steps, bounds):
    lowest, configured, highest = bounds
    controller = BackPressure(configured, 8, min_batch_size=lowest, max_batch_size=highest)

    failed = math.inf
    for step in observations(controller, steps):
        inside = lowest <= step.batch_size <= highest
        decision = controller.observe(step)
        if step.out_of_memory and inside:
            failed = min(failed, step.batch_size)
        assert decision.batch_size < failed or decision.batch_size == lowest


@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_every_figure_that_is_known_is_a_number_and_only_p_star_may_be_infinite(steps):
    controller = BackPressure()
    for step in observations(controller, steps):
        decision = controller.observe(step)
        figures = (decision.sigma, decision.kappa, decision.utilization, decision.throughput)
        assert all(figure is None or (math.isfinite(figure) and figure >= 0.0) for figure in figures)
        assert decision.p_star is None or decision.p_star >= 1.0
        assert decision.utilization is None or decision.utilization <= 1.0


@given(steps=STEPS, more=STEPS, objective=OBJECTIVES)
@settings(max_examples=60, deadline=None)
def test_a_restored_controller_decides_exactly_as_the_original(steps, more, objective):
    original = BackPressure(objective=objective)
    for step in observations(original, steps):
        original.observe(step)

    restored = BackPressure(objective=objective)
    restored.load_state_dict(json.loads(json.dumps(original.state_dict(), allow_nan=False)))

    assert restored.batch_size == original.batch_size
    for step in observations(original, more):
        assert restored.observe(step) == original.observe(step)


@given(steps=STEPS)
@settings(max_examples=30, deadline=None)
def test_p_star_is_the_argmax_of_the_reported_curve(steps):
    controller = BackPressure()
    for step in observations(controller, steps):
        decision = controller.observe(step)
        sigma, kappa, best = decision.sigma, decision.kappa, decision.p_star
        if best is None or math.isinf(best):
            continue

        def curve(p: float, sigma: float = sigma, kappa: float = kappa) -> float:
            return p / (1.0 + sigma * (p - 1.0) + kappa * p * (p - 1.0))

        assert curve(best) >= max(curve(max(1.0, 0.9 * best)), curve(1.1 * best)) * (1.0 - 1e-9)


@pytest.mark.parametrize("lost", [["observed"], ["version", "sizes"]])
def test_an_incomplete_state_is_refused(lost):
    state = {name: value for name, value in BackPressure().state_dict().items() if name not in lost}
    with pytest.raises(ValueError, match=f"state: got .*{lost[-1]}"):
        BackPressure().load_state_dict(state)


@pytest.mark.parametrize(
    ("other", "name"), [({"group_size": 4}, "group_size"), ({"max_batch_size": 32}, "sizes")]
)
def test_the_state_of_a_differently_configured_controller_is_refused(other, name):
    state = BackPressure().state_dict()
    with pytest.raises(ValueError, match=f"state {name}"):
        BackPressure(**other).load_state_dict(state)
