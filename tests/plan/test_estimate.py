"""How long a campaign takes: places, stagger, start-up, permits, retries, and what a pilot leaves open."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.plan.estimate import estimate_makespan, estimate_workload, rule_of_thumb_s
from retrain.plan.estimate.permit_queue import ClosedQueue
from retrain.plan.estimate.simulation import makespan_s, packed_s, spread_of
from retrain.plan.estimate.workload import Crowding, Failures, Launching, Pilot, RunWork, StepCost, Workload


def _campaign(conditions: dict[str, float], seeds: int, steps: int, **launching: object) -> Workload:
    costs = {name: StepCost(seconds) for name, seconds in conditions.items()}
    runs = tuple(RunWork(name, steps) for _ in range(seeds) for name in costs)
    return Workload(runs, costs, Launching(**launching))  # type: ignore[arg-type]


def _pilot(means: dict[str, float], steps: int, cv: float, seed: int = 0) -> Pilot:
    rng = random.Random(seed)
    return Pilot(
        {c: [m * rng.gammavariate(1 / cv**2, cv**2) for _ in range(steps)] for c, m in means.items()}
    )


def schedule_s(
    runs: list[list[float]], workers: int, stagger_s: float = 0.0, retry_delay_s: float = 0.0
) -> float:
    """Return when the last run ends, from the seconds that each run's attempts take."""
    how = Launching(workers, stagger_s, failures=Failures(delay_s=retry_delay_s))
    phases = [[[(0, seconds)] for seconds in attempts] for attempts in runs]
    return makespan_s(phases, how, lambda counts: (1.0,), 1)


def test_ten_equal_runs_on_four_workers_take_three_waves() -> None:
    found = estimate_makespan([60.0] * 10, workers=4)
    assert (found.p50_s, found.p90_s, found.waves, found.limited_by) == (180.0, 180.0, 3, "last wave")
    assert found.rule_of_thumb_s == rule_of_thumb_s(10 * 60, 1.0, 4) == 150.0


def test_the_change_that_helps_most_is_named_with_what_it_saves() -> None:
    best = estimate_makespan([31 * 60.0] * 10, workers=4).changes[0]
    assert best.setting == "campaign.max_workers = 5"
    assert "10 runs on 4 workers take 3 waves; 5 workers would take 2 waves and save 31 min" in best.text
    assert (best.makespan_s, best.saves_s) == (2 * 31 * 60.0, 31 * 60.0)


def test_a_second_worker_halves_the_waves() -> None:
    texts = [change.text for change in estimate_makespan([60.0] * 8, workers=1).changes]
    assert any("8 runs on 1 worker take 8 waves; 2 workers would take 4 waves" in text for text in texts)


def test_stagger_delays_each_launch() -> None:
    assert estimate_makespan([10.0] * 3, workers=3, stagger_s=2.0).p50_s == 14.0


def test_a_place_that_is_free_in_time_makes_nobody_wait_for_the_stagger() -> None:
    assert schedule_s([[10.0], [1.0], [1.0]], workers=2, stagger_s=3.0) == 10.0  # at 0, 3 and 6


def test_a_run_that_fails_is_tried_again_before_others_begin() -> None:
    # the first fails at 2 and is due at 3; the place goes to the second until 7, then to the retry
    assert schedule_s([[2.0, 10.0], [5.0], [4.0]], workers=1, retry_delay_s=1.0) == 2 + 5 + 10 + 4


def test_a_campaign_waits_for_the_delay_of_its_last_retry() -> None:
    assert schedule_s([[2.0, 10.0]], workers=3, retry_delay_s=1.0) == 13.0


def test_runs_that_started_hold_their_places_and_start_no_more() -> None:
    rest = _campaign({"a": 2.0}, 2, 5, workers=1, startup_s=3.0)
    begun = replace(rest, runs=(replace(rest.runs[0], is_started=True), rest.runs[1]))
    assert estimate_workload(rest).p50_s == 2 * (3 + 10)
    assert estimate_workload(begun).p50_s == 10 + (3 + 10)


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        ("workers", estimate_makespan([60.0] * 8, workers=2)),
        ("last wave", estimate_makespan([60.0] * 9, workers=8)),
        ("stagger", estimate_makespan([60.0] * 8, workers=8, stagger_s=30.0)),
        ("permits", estimate_makespan([60.0] * 8, workers=8, permits=2, remote_fraction=0.9)),
        ("slowest condition", estimate_makespan([60.0, 10.0, 10.0, 10.0], workers=4)),
        ("slowest condition", estimate_makespan([10.0] * 8 + [100.0], workers=3)),
    ],
)
def test_what_limits_is_named(limit: str, found: object) -> None:
    assert found.limited_by == limit  # type: ignore[attr-defined]


def test_calls_beyond_the_permits_take_turns() -> None:
    found = estimate_makespan([100.0] * 12, workers=12, permits=4, remote_fraction=1.0)
    assert found.p50_s == pytest.approx(300.0, rel=0.01)
    assert found.permit_wait_fraction == pytest.approx(2 / 3, rel=0.01)


def test_enough_permits_cost_nothing() -> None:
    assert estimate_makespan([100.0] * 4, workers=4, permits=4, remote_fraction=1.0).p50_s == 100.0


def test_one_server_with_exponential_calls_waits_as_the_machine_repair_model_says() -> None:
    # closed M/M/1//N with N = 3, think and call 1 s each: the idle probability is 1/(1+3+6+6), so a
    # cycle takes 3 / (15/16) s, of which 1.2 s are waits. Here the step's two parts share one draw.
    draws = [-math.log(1 - (i + 0.5) / 4096) for i in range(4096)]
    exponential = ClosedQueue([StepCost(2.0, 1.0)] * 3, 1, draws, random.Random(1))
    constant = ClosedQueue([StepCost(2.0, 1.0)] * 3, 1, [1.0], random.Random(1))
    assert constant.mean_wait_s() == pytest.approx(1.0)  # three calls of 1 s in turn, less 2 s alone
    assert exponential.mean_wait_s() == pytest.approx(1.2, rel=0.15)


def test_overlapping_calls_of_one_step_share_the_permits() -> None:
    costs = {"a": StepCost(10.0, permit_s=40.0, calls_at_once=4)}
    shared = Workload((RunWork("a", 100),) * 2, costs, Launching(2, permits=4))
    assert estimate_workload(shared).p50_s == pytest.approx(2 * 100 * 10.0, rel=0.02)


@pytest.mark.parametrize("workers", [1, 2])
def test_calls_of_one_step_wait_for_each_other(workers: int) -> None:
    costs = {"a": StepCost(1.0, permit_s=16.0, calls_at_once=16)}  # 16 s of calls on 4 permits take 4 s
    found = estimate_workload(Workload((RunWork("a", 100),) * workers, costs, Launching(workers, permits=4)))
    assert found.p50_s == pytest.approx(100 * 4.0 * workers, rel=0.02)
    assert found.permit_wait_fraction == pytest.approx(1 - 1 / (4 * workers), rel=0.02)


def test_a_condition_without_calls_does_not_wait_for_permits() -> None:
    costs = {"local": StepCost(1.0), "remote": StepCost(0.5, 0.5)}
    runs = (RunWork("local", 100), *[RunWork("remote", 10)] * 6)
    assert estimate_workload(Workload(runs, costs, Launching(7, permits=1))).p50_s == pytest.approx(
        100.0, rel=1e-6
    )


def test_a_pilot_gives_a_spread_and_the_same_seed_the_same_estimate() -> None:
    workload, pilot = _campaign({"a": 2.0}, 6, 100, workers=3), _pilot({"a": 2.0}, 80, 0.3)
    found = estimate_workload(workload, pilot)
    assert found.p50_s < found.p90_s < 1.1 * found.p50_s
    assert estimate_workload(workload, pilot) == found != estimate_workload(workload, pilot, seed=1)


def test_a_longer_pilot_leaves_less_open() -> None:
    workload = _campaign({"a": 2.0}, 6, 100, workers=3)
    spreads = [
        (e.p90_s / e.p50_s)
        for e in (estimate_workload(workload, _pilot({"a": 2.0}, n, 0.3)) for n in (20, 2000))
    ]
    assert spreads[1] - 1 < 0.6 * (spreads[0] - 1)


def test_p90_covers_what_pilots_of_thirty_steps_leave_open() -> None:
    rng, covered = random.Random(3), []
    for world in range(60):
        times = {"a": 2.0, "b": 3.0}
        seen = _pilot(times, 30, 0.3, seed=world)
        means = {c: statistics.fmean(t) for c, t in seen.step_times_s.items()}
        runs = [[m * 60 * rng.gauss(1, 0.3 / math.sqrt(60))] for _ in range(3) for m in times.values()]
        guess = estimate_workload(_campaign(means, 3, 60, workers=3), seen, seed=1000 + world)
        covered.append(schedule_s(runs, 3) <= guess.p90_s)
    assert 0.78 <= statistics.fmean(covered) < 1  # 90 % within three standard errors


@pytest.mark.parametrize(
    ("times", "tail"),
    [
        ([1.0, 1.1, 0.9] * 40, "light"),
        ([1.0, 1.1, 0.9] * 5, "short"),
        ([1.0, 1.1, 0.9] * 40 + [30.0], "heavy"),
        ([1.0, 1.1, 0.9] * 2000 + [5.0], "light"),  # rare, seen, and too small to move the mean
        ([], "none"),
    ],
)
def test_a_pilot_says_whether_its_p90_can_be_relied_on(times: list[float], tail: str) -> None:
    found = estimate_workload(_campaign({"a": 1.0}, 2, 10, workers=1), Pilot({"a": times}))
    assert found.tail == tail


def test_runs_that_differ_among_themselves_widen_the_spread() -> None:
    workload, steady = _campaign({"a": 1.0}, 2, 100, workers=2), Pilot({"a": [1.0] * 200}, runs={"a": 4})
    assert estimate_workload(workload, steady).p90_s == 100.0
    found = estimate_workload(workload, replace(steady, run_variance=0.01))  # runs differ by a tenth
    assert 105 < found.p50_s < 112  # the longer of two: half a standard deviation more on average
    assert found.p90_s > 115


def test_conditions_measured_by_the_same_runs_are_off_together() -> None:
    times = dict.fromkeys("abcdefgh", 1.0)
    workload = _campaign(times, 1, 100, workers=1)
    apart = Pilot({c: [1.0] * 200 for c in times}, runs=dict.fromkeys(times, 1), run_variance=0.01)
    together = replace(apart, same_runs=dict.fromkeys(times, "a"))
    estimates = [estimate_workload(workload, pilot) for pilot in (apart, together)]
    errors = [estimate.p90_s / estimate.p50_s - 1 for estimate in estimates]
    assert errors[1] > 1.7 * errors[0]  # that of the runs themselves stays: sqrt(9 / 2) at most


def test_slow_steps_that_come_in_rows_widen_the_spread() -> None:
    mixed = [1.0, 2.0] * 60
    in_rows = sorted(mixed)
    assert spread_of(Pilot({"a": mixed})).persistence == 1.0
    assert spread_of(Pilot({"a": in_rows})).persistence > 10


def test_failures_cost_start_ups_and_repeated_steps() -> None:
    # one run of 1 h of steps that fails about every 10 min; each failure costs a start-up of 10 min at least
    failing = Failures(per_hour=6, retries=2)
    calm = _campaign({"a": 36.0}, 1, 100, workers=1, startup_s=600.0)
    failed = replace(calm, launching=replace(calm.launching, failures=failing))
    assert estimate_workload(failed).p50_s >= estimate_workload(calm).p50_s + 2 * 600


@given(
    st.lists(st.floats(0.1, 100), min_size=1, max_size=20),
    st.integers(1, 8),
    st.floats(0, 5),
    st.floats(0, 3),
)
def test_no_campaign_ends_before_its_work_or_its_longest_run(
    runs: list[float], workers: int, stagger_s: float, startup_s: float
) -> None:
    total = estimate_makespan(runs, workers, stagger_s=stagger_s, startup_s=startup_s).p50_s
    work = sum(runs) + startup_s * len(runs)
    assert total >= max(work / workers, max(runs) + startup_s) - 1e-9
    assert total <= work + stagger_s * len(runs) + 1e-9


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 8),
    st.floats(0.05, 1.5),
    st.floats(0, 4),
    st.lists(st.floats(0.5, 2), min_size=8, max_size=8),
)
def test_the_lower_bound_lies_below_p50_however_steps_vary_fail_and_crowd(
    runs: int, workers: int, cv: float, per_hour: float, slowdowns: list[float]
) -> None:
    crowding = Crowding(tuple((float(n), times) for n, times in enumerate(slowdowns, 1)))
    costs = {"a": 30.0, "b": 90.0}
    failing = Failures(per_hour)
    work = _campaign(costs, runs, 20, workers=workers, startup_s=5.0, failures=failing, crowding=crowding)
    found = estimate_workload(work, _pilot(costs, 20, cv))
    assert 0 < found.lower_bound_s <= found.p50_s * (1 + 1e-9)


def test_the_lower_bound_of_runs_that_fill_all_waves_is_their_time() -> None:
    work = _campaign({"a": 2.0}, 6, 100, workers=3, startup_s=4.0, closing_s=1.0, permits=1)
    assert estimate_workload(work).lower_bound_s == estimate_workload(work).p50_s == 2 * (4 + 200 + 1)
    crowded = replace(work, launching=replace(work.launching, crowding=Crowding(((1.0, 1.0), (3.0, 2.0)))))
    assert estimate_workload(crowded).lower_bound_s == 4 * (4 + 200 + 1)


@given(
    works_s=st.lists(st.floats(0, 1000), min_size=1, max_size=30),
    workers=st.integers(1, 12),
    slowdowns=st.lists(st.floats(1, 4), min_size=1, max_size=4),
)
def test_runs_packed_by_their_ends_take_as_long_as_event_by_event(
    works_s: list[float], workers: int, slowdowns: list[float]
) -> None:
    crowding = Crowding(tuple((3.0 * i + 1, times) for i, times in enumerate(slowdowns)))
    how = Launching(workers, crowding=crowding)
    events_s = makespan_s(
        [[[(0, work_s)]] for work_s in works_s], how, lambda counts: (crowding.of(*counts),), 1
    )
    assert packed_s(works_s, how) == pytest.approx(events_s)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 12), st.integers(1, 8), st.integers(1, 8), st.floats(0.05, 1))
def test_permits_never_make_a_campaign_faster_than_its_calls_allow(
    runs: int, workers: int, permits: int, remote: float
) -> None:
    free = estimate_makespan([60.0] * runs, workers).p50_s
    held = estimate_makespan([60.0] * runs, workers, permits=permits, remote_fraction=remote).p50_s
    assert held >= max(free, runs * 60 * remote / permits) * 0.98


@pytest.mark.parametrize(
    "bad",
    [{"workers": 0}, {"workers": 1, "permits": 0}, {"workers": 1, "stagger_s": math.nan}],
)
def test_impossible_estimates_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        estimate_makespan([1.0], **bad)  # type: ignore[arg-type]


def test_a_share_of_calls_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not in \[0, 1\]"):
        estimate_makespan([1.0], 1, remote_fraction=1.5)


def test_a_run_without_a_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="no cost is given for b"):
        Workload((RunWork("b", 1),), {"a": StepCost(1.0)}, Launching(1))


def test_a_campaign_of_nothing_takes_no_time() -> None:
    assert estimate_makespan([], 3).p50_s == 0.0
