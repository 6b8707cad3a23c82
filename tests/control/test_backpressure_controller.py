"""The controller finds the operating point of known curves, and names regimes as documented."""

from __future__ import annotations

import math

import numpy as np
import pytest

from retrain.control.rules.backpressure import BackPressure, BackPressureDecision, StepObservation
from retrain.control.rules.backpressure.measurements import goodput_best

GROUP = 8


def usl_throughput(batch: float, best: float, flatness: float = 1.0) -> float:
    return 1000.0 * (2.0 + flatness) / (best / batch + batch / best + flatness)


def observation(batch: int, throughput: float, **more) -> StepObservation:
    return StepObservation(batch, GROUP, tokens=100.0 * batch, step_time_s=100.0 * batch / throughput, **more)


def drive(
    controller: BackPressure, curve, steps: int, noise: float = 0.0, seed: int = 0
) -> list[BackPressureDecision]:
    """Run the controller on a curve; returns its decisions."""
    rng = np.random.default_rng(seed)
    decisions = []
    for _ in range(steps):
        batch = controller.batch_size
        measured = curve(batch) * math.exp(rng.normal(0.0, noise))
        decisions.append(controller.observe(observation(batch, measured)))
    return decisions


def mean_regret(decisions: list[BackPressureDecision], curve) -> float:
    best = max(curve(batch) for batch in range(1, 65))
    return float(np.mean([1.0 - curve(decision.batch_size) / best for decision in decisions]))


def test_the_first_step_runs_the_configured_batch():
    assert BackPressure(batch_size=12).batch_size == 12


def test_warm_up_doubles_while_that_pays():
    controller = BackPressure(8, GROUP)

    decisions = drive(controller, lambda batch: 10.0 * batch, 3)

    assert [decision.batch_size for decision in decisions] == [16, 32, 64]
    assert {(decision.regime, decision.action) for decision in decisions} == {("warmup", "hold")}


def test_without_warm_up_steps_nothing_is_called_warm_up():
    controller = BackPressure(8, GROUP, warmup_steps=0)
    assert "warmup" not in {d.regime for d in drive(controller, lambda batch: 10.0 * batch, 20)}


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.2])
@pytest.mark.parametrize("best", [3, 16, 32, 90])
def test_a_scalability_curve_is_followed_closely(best, noise):
    def curve(batch):
        return usl_throughput(batch, best)

    decisions = drive(BackPressure(8, GROUP), curve, 300, noise)

    assert mean_regret(decisions, curve) < 0.07


def test_the_operating_point_is_the_margin_times_p_star():
    decisions = drive(BackPressure(8, GROUP), lambda batch: usl_throughput(batch, 32, 0.0), 150, 0.01)

    last = decisions[-1]
    assert last.p_star == pytest.approx(32 * GROUP, rel=0.1)
    assert last.batch_size * GROUP == pytest.approx(0.85 * last.p_star, rel=0.1)


def test_no_more_throughput_is_given_up_for_the_margin_than_the_law_can_cost():
    sharpest_loss = 1.0 - 2.0 * 0.85 / (1.0 + 0.85**2)

    def sharp(batch):
        return usl_throughput(batch, 24, -0.7)  # sharper than the law allows, so the fitted p* is too low

    decisions = drive(BackPressure(8, GROUP), sharp, 150)
    assert sharp(decisions[-1].batch_size) >= (1.0 - sharpest_loss) * sharp(24)


@pytest.mark.parametrize("curve", [lambda b: 10.0 * b, lambda b: 1000.0 * b / (20.0 + b)])
def test_without_an_optimum_the_largest_batch_is_used(curve):
    decisions = drive(BackPressure(8, GROUP), curve, 100, 0.02)
    assert decisions[-1].batch_size == 64


def test_exactly_linear_throughput_reports_no_optimum():
    last = drive(BackPressure(8, GROUP), lambda batch: 10.0 * batch, 30)[-1]
    assert (last.sigma, last.kappa, last.p_star) == (0.0, 0.0, math.inf)


def test_before_three_sizes_are_known_no_optimum_is_claimed():
    first = BackPressure(8, GROUP).observe(observation(8, 100.0))
    assert (first.sigma, first.kappa, first.p_star, first.utilization) == (None, None, None, None)


def law_throughput(batch: float, sigma: float, kappa: float) -> float:
    p = batch * GROUP
    return 1000.0 * p / (1.0 + sigma * (p - 1.0) + kappa * p * (p - 1.0))


@pytest.mark.parametrize("kappa", [0.0, 1e-5, 1e-4, 1e-3, 1e-2])
def test_an_optimum_is_reported_only_where_the_measurements_determine_it(kappa):
    best = math.sqrt(0.7 / kappa) if kappa else math.inf
    reported = [
        decision.p_star
        for seed in range(3)
        for decision in drive(
            BackPressure(8, GROUP), lambda b: law_throughput(b, 0.3, kappa), 150, 0.05, seed
        )
        if decision.p_star is not None
    ]

    near = sum(best / 3.0 <= p_star <= 3.0 * best for p_star in reported)
    assert near >= 0.85 * len(reported)
    assert kappa < 1e-3 or len(reported) > 300, "a curve with a clear optimum is determined"


@pytest.mark.parametrize("kappa", [1e-5, 1e-3, 1e-2])
def test_no_step_above_the_margin_times_p_star_is_called_optimal(kappa):
    controller = BackPressure(8, GROUP)
    rng = np.random.default_rng(0)
    regimes = set()
    for _ in range(150):
        batch = controller.batch_size
        measured = law_throughput(batch, 0.05, kappa) * math.exp(rng.normal(0.0, 0.05))
        decision = controller.observe(observation(batch, measured))
        if decision.p_star is not None and batch * GROUP > 0.85 * decision.p_star:
            regimes.add(decision.regime)
    assert regimes <= {"retrograde", "warmup"}


def test_where_a_batch_below_the_limit_costs_too_much_the_reason_names_the_limit():
    last = drive(BackPressure(8, GROUP), lambda b: law_throughput(b, 0.3, 1e-2), 100, 0.02)[-1]
    assert last.batch_size == 1, "p* is 8.4 rollouts, and a prompt has 8"
    assert (last.action, last.regime) == ("hold", "retrograde")
    assert "above 0.85 x p*" in last.reason


def test_utilization_compares_with_the_best_batch_that_fits_in_memory():
    controller = BackPressure(8, GROUP)
    for _ in range(60):
        batch = controller.batch_size
        decision = controller.observe(observation(batch, 10.0 * batch, out_of_memory=batch >= 17))
    assert decision.batch_size == 16
    assert decision.utilization == pytest.approx(1.0)


def test_past_the_optimum_is_retrograde_and_throttles():
    decisions = drive(BackPressure(64, GROUP), lambda batch: usl_throughput(batch, 8), 5)
    assert ("retrograde", "throttle") in {(decision.regime, decision.action) for decision in decisions}


def test_actions_follow_regimes_as_documented():
    allowed = {
        ("warmup", "hold"),
        ("retrograde", "throttle"),
        ("retrograde", "hold"),
        ("compute_bound", "increase"),
        ("compute_bound", "hold"),
        ("memory_bound", "hold"),
        ("optimal", "hold"),
    }
    for best in (3, 16, 90):
        decisions = drive(BackPressure(8, GROUP), lambda b, best=best: usl_throughput(b, best), 200, 0.1)
        assert {(decision.regime, decision.action) for decision in decisions} <= allowed


def test_a_changed_curve_is_noticed_and_followed():
    controller = BackPressure(8, GROUP)
    drive(controller, lambda batch: usl_throughput(batch, 32), 100, 0.05)

    decisions = drive(controller, lambda batch: usl_throughput(batch, 5), 60, 0.05, seed=1)

    assert any("the curve changed" in decision.reason for decision in decisions)
    assert decisions[-1].batch_size <= 8


def test_utilization_is_that_of_the_next_batch_and_not_of_sizes_left_behind():
    decisions = drive(BackPressure(1, GROUP, throttle_margin=1.0), lambda b: usl_throughput(b, 32), 12)
    assert decisions[-1].utilization == pytest.approx(1.0, abs=0.05)
    assert decisions[-1].throughput < 0.8 * usl_throughput(32, 32)  # the moving average lags


def test_only_the_sizes_given_and_the_bounds_are_recommended():
    controller = BackPressure(8, GROUP, sizes=[4, 13, 22, 100], max_batch_size=40)
    decisions = drive(controller, lambda batch: usl_throughput(batch, 20), 80, 0.05)
    assert {decision.batch_size for decision in decisions} <= {1, 4, 8, 13, 22, 40}
    assert decisions[-1].batch_size in (13, 22)


def test_holding_says_why_and_learns_nothing():
    controller = BackPressure(8, GROUP)
    drive(controller, lambda batch: usl_throughput(batch, 16), 30, 0.02)
    before = controller.state_dict()

    decision = controller.hold("the step was skipped")

    assert (decision.action, decision.reason) == ("hold", "the step was skipped")
    assert decision.batch_size == controller.batch_size
    assert controller.state_dict() == before


def test_stalls_in_a_row_that_differ_change_nothing():
    controller = BackPressure(8, GROUP)
    before = drive(controller, lambda batch: usl_throughput(batch, 16), 50, 0.02)[-1].batch_size
    for factor in (4.0, 9.0, 25.0):
        decision = controller.observe(observation(before, usl_throughput(before, 16) / factor))
        assert "the curve changed" not in decision.reason
    assert decision.batch_size == before


def test_a_machine_that_became_slow_is_believed_by_the_third_step():
    controller = BackPressure(8, GROUP)
    before = drive(controller, lambda batch: usl_throughput(batch, 16), 50, 0.02)[-1].batch_size
    slow = [controller.observe(observation(before, usl_throughput(before, 16) / 9.0)) for _ in range(3)]
    assert ["measured again" in decision.reason for decision in slow][::2] == [True, False]


def test_a_pair_of_stalls_at_a_size_that_is_new_condemns_no_size():
    controller = BackPressure(8, GROUP)
    for factor in (1.0, 1.0, 10.0, 10.0):
        batch = controller.batch_size
        controller.observe(observation(batch, usl_throughput(batch, 60) / factor))
    decisions = drive(controller, lambda batch: usl_throughput(batch, 60), 20)
    assert decisions[-1].batch_size >= 40


def test_a_configured_size_that_never_fitted_costs_no_exploring():
    controller = BackPressure(8, GROUP)
    while controller.batch_size > 3:
        controller.observe(observation(controller.batch_size, 1.0, out_of_memory=True))
    decisions = drive(controller, lambda batch: usl_throughput(batch, 60), 10)
    assert decisions[-1].batch_size == 3  # 4 did not fit; after 8, 4 and 2 there is one size left to try


def test_one_stalled_step_changes_nothing():
    controller = BackPressure(8, GROUP)
    before = drive(controller, lambda batch: usl_throughput(batch, 16), 50, 0.02)[-1].batch_size

    decision = controller.observe(observation(before, usl_throughput(before, 16) / 8.0))

    assert (decision.batch_size, decision.action) == (before, "hold")
    assert "far slower" in decision.reason


@pytest.mark.parametrize("limit", [5, 6, 7, 8, 9, 17, 18, 25, 33, 40, 64])
def test_running_out_of_memory_happens_at_most_twice(limit):
    controller, failures = BackPressure(8, GROUP), 0
    for _ in range(200):
        batch = controller.batch_size
        failures += batch >= limit
        controller.observe(observation(batch, 10.0 * batch, out_of_memory=batch >= limit))

    assert failures <= 2
    assert controller.batch_size >= 0.94 * (limit - 1), (
        "the last step before the second failure was a sixteenth"
    )


@pytest.mark.parametrize("limit", [9, 17, 25, 33, 40, 64])
def test_with_memory_telemetry_nothing_runs_out_of_memory(limit):
    controller = BackPressure(8, GROUP)
    for _ in range(200):
        batch = controller.batch_size
        assert batch < limit
        fraction = 0.25 + 0.75 * batch / limit
        controller.observe(observation(batch, 10.0 * batch, memory_fraction=fraction))

    assert controller.batch_size >= 0.9 * (limit - 1)


def test_out_of_memory_at_the_smallest_batch_holds_and_says_so():
    controller = BackPressure(2, GROUP, min_batch_size=2)

    decision = controller.observe(observation(2, 1.0, out_of_memory=True))

    assert (decision.batch_size, decision.action) == (2, "hold")
    assert "min_batch_size" in decision.reason


def test_a_batch_outside_the_bounds_is_ignored_and_named():
    controller = BackPressure(8, GROUP, max_batch_size=32)
    before = controller.state_dict()

    decision = controller.observe(observation(40, 5.0))

    assert "ignored: a batch of 40 is outside 1..32" in decision.reason
    assert controller.state_dict() == before


def test_another_group_size_counts_by_its_concurrency():
    controller = BackPressure(8, GROUP)
    controller.observe(observation(8, 100.0))
    reference = BackPressure(8, GROUP)
    reference.observe(observation(8, 100.0))

    wide = controller.observe(StepObservation(8, 2 * GROUP, tokens=1600.0, step_time_s=10.0))
    same = reference.observe(StepObservation(16, GROUP, tokens=1600.0, step_time_s=10.0))

    assert wide == same


def test_goodput_settles_where_throughput_times_efficiency_is_best():
    noise_scale = 60.0
    controller = BackPressure(8, GROUP, objective="goodput", throttle_margin=1.0)

    def goodput(batch):
        return usl_throughput(batch, 60) / (noise_scale + batch * GROUP)

    for _ in range(150):
        batch = controller.batch_size
        controller.observe(observation(batch, usl_throughput(batch, 60), noise_scale=noise_scale))

    best = max(range(1, 65), key=goodput)
    assert goodput(controller.batch_size) >= 0.97 * goodput(best)
    assert best < 40


def test_goodput_without_noise_scales_falls_back_to_throughput_and_says_so():
    controller = BackPressure(8, GROUP, objective="goodput")
    decision = controller.observe(observation(8, 100.0, noise_scale=math.nan))
    assert "0 of 5 noise-scale samples so far" in decision.reason


def test_micro_batches_are_chosen_by_throughput_because_they_teach_the_same():
    controller = BackPressure(8, GROUP, objective="goodput", control="microbatch", throttle_margin=1.0)
    for _ in range(80):
        batch = controller.batch_size
        decision = controller.observe(observation(batch, usl_throughput(batch, 60), noise_scale=60.0))
    assert usl_throughput(controller.batch_size, 60) >= 0.98 * usl_throughput(60, 60)
    assert "a micro-batch's size does not affect learning" in decision.reason


@pytest.mark.parametrize(
    ("sigma", "kappa", "phi"), [(0.1, 1e-4, 50.0), (0.0, 0.01, 5.0), (0.02, 0.05, 0.5), (0.3, 0.0, 9.0)]
)
def test_the_goodput_optimum_beats_its_neighbours(sigma, kappa, phi):
    def goodput(p):
        return p / (1 + sigma * (p - 1) + kappa * p * (p - 1)) / (phi + p)

    best = goodput_best(sigma, kappa, phi)

    assert goodput(best) >= max(goodput(max(1.0, 0.99 * best)), goodput(1.01 * best))


@pytest.mark.parametrize("phi", [1e12, 1e100, 1e300])
def test_with_hardly_any_signal_the_goodput_optimum_is_that_of_throughput(phi):
    assert goodput_best(0.1, 1e-6, phi) == pytest.approx(math.sqrt(0.9 / 1e-6), rel=1e-3)


@pytest.mark.parametrize("phi", [1e-300, 1e-12])
def test_without_noise_the_goodput_optimum_is_a_single_rollout(phi):
    assert goodput_best(0.1, 1e-6, phi) == 1.0


def test_throughput_that_only_falls_has_its_optimum_at_one_rollout():
    controller = BackPressure(8, GROUP, throttle_margin=1.0)
    for _ in range(40):
        batch = controller.batch_size
        decision = controller.observe(observation(batch, 1.0 / batch))
    assert decision.p_star == 1.0


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"throttle_margin": 0.0}, "throttle_margin"),
        ({"throttle_margin": math.nan}, "throttle_margin"),
        ({"increase_margin": 1.5}, "increase_margin"),
        ({"min_batch_size": 0}, "min_batch_size"),
        ({"min_batch_size": 9, "max_batch_size": 8}, "max_batch_size"),
        ({"peak_gflops": -1.0}, "peak_gflops"),
        ({"peak_bw_gb_s": math.inf}, "peak_bw_gb_s"),
        ({"objective": "speed"}, "objective"),
        ({"control": "tokens"}, "control"),
        ({"batch_size": 65}, "batch_size"),
        ({"group_size": 0}, "group_size"),
        ({"batch_size": "8"}, "batch_size"),
        ({"group_size": 2.5}, "group_size"),
        ({"sizes": [4, 2.5]}, "sizes"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(keys, name):
    with pytest.raises(ValueError, match=f"^{name}: got"):
        BackPressure(**keys)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"tokens": 0}, "tokens"),
        ({"tokens": -5}, "tokens"),
        ({"tokens": math.inf}, "tokens"),
        ({"step_time_s": 0.0}, "step_time_s"),
        ({"step_time_s": 1e-40}, "tokens / step_time_s"),
        ({"step_time_s": math.nan}, "step_time_s"),
        ({"batch_size": 0}, "batch_size"),
        ({"group_size": -1}, "group_size"),
        ({"memory_fraction": 1.2}, "memory_fraction"),
        ({"memory_fraction": math.nan}, "memory_fraction"),
    ],
)
def test_an_impossible_measurement_is_refused_by_name(change, name):
    measured = {"batch_size": 8, "group_size": 8, "tokens": 100.0, "step_time_s": 1.0}
    with pytest.raises(ValueError, match=f"^{name}: got"):
        StepObservation(**{**measured, **change})
