import math
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from retrain.control.machine.throttle import ThrottleLevel, TrainingThrottle
from tests.semaphore_processes import wait_until


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def under(*loads, **choices):
    """A throttle that reads these loads in turn, the last one for ever."""
    left = list(loads)
    return TrainingThrottle(custom_load_fn=lambda: left.pop(0) if len(left) > 1 else left[0], **choices)


def test_a_custom_load_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match="custom_load_fn"):
        under("0.5").check()


@pytest.mark.parametrize("load", [1.01, 1.3, 64, np.float32(2.5), math.inf])
def test_a_custom_load_above_1_is_saturated(load):
    state = under(load).check()
    assert (state.level, state.load, state.is_known) == (ThrottleLevel.PAUSED, 1.0, True)
    assert state.reason == f"load {load:.2f}, saturated from 0.85: custom {load:.2f}"


@pytest.mark.parametrize("load", [-0.01, -math.inf, math.nan, np.float32("nan")])
def test_a_custom_load_that_is_negative_or_nan_is_unknown(load):
    state = under(load, on_unknown="minimal").check()
    assert (state.level, state.load, state.is_known) == (ThrottleLevel.MINIMAL, None, False)
    assert f"returned {load:g}" in state.reason


@pytest.mark.parametrize("load", [0, 1, np.float32(0.5)])
def test_any_number_in_range_is_a_load(load):
    assert under(load).fleet_load() == load


def test_a_custom_load_may_be_unknown():
    throttle = under(None)
    assert throttle.fleet_load() is None
    assert throttle.check().level is ThrottleLevel.REDUCED
    assert not throttle.check().is_known


def test_a_load_function_that_raises_leaves_the_load_unknown_and_is_heard():
    def broken() -> float:
        raise ConnectionError("the monitor is down")

    state = TrainingThrottle(custom_load_fn=broken, on_unknown="minimal").check()

    assert (state.level, state.load, state.is_known) == (ThrottleLevel.MINIMAL, None, False)
    assert "ConnectionError: the monitor is down" in state.reason


def test_a_load_function_that_hangs_leaves_the_load_unknown_until_it_returns(monkeypatch):
    monkeypatch.setattr("retrain.control.machine.throttle.READING_LIMIT_S", 0.05)
    returned, calls = threading.Event(), []

    def hangs() -> float:
        calls.append(1)
        returned.wait()
        return 0.1

    throttle = TrainingThrottle(custom_load_fn=hangs, on_unknown="paused")
    first, second = throttle.check(), throttle.check()
    assert [state.level for state in (first, second)] == [ThrottleLevel.PAUSED] * 2
    assert "no reading within 0.05 s" in first.reason
    assert len(calls) == 1

    returned.set()
    wait_until(lambda: throttle.check().is_known)


def test_ctrl_c_inside_a_load_function_is_not_swallowed():
    def interrupted() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TrainingThrottle(custom_load_fn=interrupted).check()


def test_min_level_may_be_named_as_in_a_campaign_file():
    assert under(0.1, min_level="minimal").check().level is ThrottleLevel.MINIMAL


@pytest.mark.parametrize(
    "choice", [{"min_level": "none"}, {"scope": "mine"}, {"history_size": 0}, {"on_unknown": "go"}]
)
def test_choices_out_of_range_are_refused(choice):
    with pytest.raises(ValueError, match=r"needs|not a valid"):
        TrainingThrottle(**choice)


@pytest.mark.parametrize(("load", "batch"), [(0.1, 9), (0.4, 4), (0.7, 2), (0.9, 1)])
def test_the_batch_is_scaled_down_to_one_at_least(load, batch):
    assert under(load).effective_batch_size(9) == batch


def test_a_base_batch_below_one_is_refused():
    with pytest.raises(ValueError, match="base_batch=0"):
        under(0.1).effective_batch_size(0)


def test_a_check_is_due_at_first_and_after_the_levels_interval():
    clock = Clock()
    throttle = under(0.4, clock=clock)
    assert throttle.should_check()
    throttle.check()
    clock.now_s = 14.9
    assert not throttle.should_check()
    clock.now_s = 15.0
    assert throttle.should_check()


def test_the_batch_is_the_last_checks_until_a_check_is_due():
    clock = Clock()
    throttle = under(0.1, 0.9, clock=clock)
    assert [throttle.effective_batch_size(8), throttle.effective_batch_size(8)] == [8, 8]
    clock.now_s = 30.0
    assert throttle.effective_batch_size(8) == 1


def test_history_keeps_all_states_with_wall_clock_times():
    throttle = under(0.1, clock=Clock())
    began_s = time.time()
    for _ in range(1500):
        throttle.check()
    times = [at_s for at_s, _ in throttle.history()]
    assert len(times) == 1500
    assert began_s <= times[0] <= times[-1] <= time.time()


def test_history_is_bounded_and_in_order():
    clock = Clock()
    throttle = under(0.1, history_size=3, wall_clock=clock)
    for clock.now_s in (0.0, 1.0, 2.0, 3.0):
        throttle.check()
    assert [at_s for at_s, _ in throttle.history()] == [1.0, 2.0, 3.0]


def test_the_summary_says_level_and_reason():
    assert under(0.7).summary() == "[minimal] batch×0.25 workers=1 gpu=25% | fleet_load=0.70 zone=busy"


def test_waiting_ends_when_the_load_has_been_low_for_one_more_poll():
    seen = []
    state = under(0.9, 0.9, 0.1).wait_for_idle(poll=0.001, on_poll=seen.append)
    assert state.level is ThrottleLevel.FULL
    assert len(seen) >= 3


@pytest.mark.parametrize("poll", [0, -1, math.nan, math.inf])
def test_polling_without_a_pause_is_refused(poll):
    with pytest.raises(ValueError, match="poll="):
        under(0.9).wait_for_idle(poll=poll)


def test_a_timeout_that_is_no_number_is_refused_rather_than_never_over():
    with pytest.raises(ValueError, match="timeout=nan"):
        under(0.9).wait_for_idle(timeout=math.nan, poll=0.001)


def test_waiting_times_out():
    with pytest.raises(TimeoutError, match=r"still paused after 0\.01 s; load 0\.90"):
        under(0.9).wait_for_idle(timeout=0.01, poll=0.002)


def test_an_event_ends_the_wait_at_once():
    stop = threading.Event()
    state = under(0.9).wait_for_idle(poll=600, stop=stop, on_poll=lambda _: stop.set())
    assert not state.should_train


WAITER = """
from retrain.control.machine.throttle import TrainingThrottle
try:
    throttle = TrainingThrottle(custom_load_fn=lambda: 0.9)
    throttle.wait_for_idle(poll=600, on_poll=lambda state: print("waiting", flush=True))
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_ends_the_wait_at_once():
    with subprocess.Popen([sys.executable, "-c", WAITER], stdout=subprocess.PIPE, text=True) as waiter:
        assert waiter.stdout.readline() == "waiting\n"
        waiter.send_signal(signal.SIGINT)
        assert waiter.stdout.read() == "interrupted\n"


def test_a_resumed_throttle_decides_as_an_undisturbed_one():
    loads, after = (0.9, 0.1), 8.0
    clock, later = Clock(), Clock()
    first = under(*loads, clock=clock)
    for clock.now_s in (0.0, 5.0, 7.0):
        first.check()
    later.now_s = 1000.0  # another process's clock
    resumed = under(0.1, clock=later)
    resumed.load_state_dict(first.state_dict())
    for step_s in (1.0, 1.0, after):
        clock.now_s += step_s
        later.now_s += step_s
        assert resumed.check().level is first.check().level
    assert resumed.check().level is ThrottleLevel.FULL


def test_the_state_of_an_unused_throttle_can_be_loaded():
    throttle = under(0.1)
    throttle.load_state_dict(throttle.state_dict())
    assert throttle.check().level is ThrottleLevel.FULL


def used(throttle):
    throttle.check()
    return throttle


def test_a_resumed_level_is_raised_to_the_minimum():
    throttle = under(0.1, min_level="minimal")
    throttle.load_state_dict(used(under(0.1)).state_dict())
    assert throttle.check().level is ThrottleLevel.MINIMAL


def test_importing_the_throttle_loads_nothing_heavy():
    heavy = "sorted({'numpy', 'psutil', 'pynvml', 'pydantic'} & set(sys.modules))"
    code = f"import sys, retrain.control.machine.throttle; print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
