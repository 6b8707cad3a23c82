"""The blocking limiter, with real threads; every wait here ends by an event, never by a pause."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from retrain.trainer.pipeline import ClosedError, RateLimiter

BOUND_S = 30  # only reached if the test fails


@pytest.fixture
def call():
    """Return a function that calls another in its own thread and returns the future."""
    with ThreadPoolExecutor(max_workers=8) as threads:
        yield threads.submit


def test_a_batch_waits_for_its_samples(call):
    limiter = RateLimiter(3)
    limiter.produced(2)
    consumer = call(limiter.consume)
    limiter.produced(1)
    consumer.result(BOUND_S)
    assert limiter.stats().balance == 0


def test_samples_wait_for_the_batch_before(call):
    limiter = RateLimiter(3)
    limiter.produced(3)
    producer = call(limiter.produced, 1)
    limiter.consume()
    producer.result(BOUND_S)
    assert limiter.stats().balance == 1


def test_too_many_samples_time_out_and_are_not_counted():
    limiter = RateLimiter(3)
    limiter.produced(3)
    with pytest.raises(TimeoutError, match="batches to be consumed"):
        limiter.produced(1, timeout_s=0)
    assert limiter.stats().produced == 3


def test_too_few_samples_time_out_and_nothing_is_consumed():
    limiter = RateLimiter(3)
    with pytest.raises(TimeoutError, match="samples to be produced"):
        limiter.consume(timeout_s=0)
    assert limiter.stats().consumed == 0


def test_two_sides_without_any_other_order_keep_the_ratio(call):
    limiter = RateLimiter(2.5)
    producers = [call(lambda: [limiter.produced() for _ in range(500)]) for _ in range(2)]
    consumer = call(lambda: [limiter.consume() for _ in range(400)])
    for side in (*producers, consumer):
        side.result(BOUND_S)
    assert limiter.stats().ratio == 1


def test_several_batches_at_once_are_served_though_the_pace_allows_one(call):
    limiter = RateLimiter(2)
    consumer = call(limiter.consume, 5)
    producer = call(lambda: [limiter.produced() for _ in range(10)])
    consumer.result(BOUND_S)
    producer.result(BOUND_S)


@pytest.mark.parametrize(("side", "held"), [("produced", 3), ("consume", 1)])
def test_closing_wakes_every_waiter(call, side, held):
    limiter = RateLimiter(3)
    limiter.produced(held)
    waiters = [call(getattr(limiter, side)) for _ in range(4)]
    limiter.close()
    assert all(isinstance(waiter.exception(BOUND_S), ClosedError) for waiter in waiters)


def test_a_closed_limiter_refuses_further_calls():
    with RateLimiter(3) as limiter:
        limiter.produced(3)
    with pytest.raises(ClosedError, match="closed"):
        limiter.consume()


def test_the_end_of_production_lets_consumers_pass(call):
    limiter = RateLimiter(3, watermark=9)
    consumer = call(limiter.consume, 2)
    limiter.finish()
    consumer.result(BOUND_S)


def test_a_limiter_that_is_off_counts_and_never_waits():
    limiter = RateLimiter(None)
    limiter.consume(timeout_s=0)
    limiter.produced(99, timeout_s=0)
    assert (limiter.stats().produced, limiter.stats().consumed, limiter.stats().ratio) == (99, 1, None)


def test_the_first_batch_waits_for_the_watermark():
    limiter = RateLimiter(2, watermark=6)
    limiter.produced(5, timeout_s=0)
    with pytest.raises(TimeoutError):
        limiter.consume(timeout_s=0)
    limiter.produced(1, timeout_s=0)
    limiter.consume(timeout_s=0)


@pytest.mark.parametrize(("sampled", "is_stale"), [(3, False), (2, False), (1, True)])
def test_samples_older_than_the_bound_are_stale(sampled, is_stale):
    assert RateLimiter(2, max_staleness=1).is_stale(sampled, current_version=3) is is_stale


def test_discarded_samples_make_room_for_fresh_ones():
    limiter = RateLimiter(2)
    limiter.produced(2)
    limiter.discard(1)
    limiter.produced(1, timeout_s=0)
    limiter.consume(timeout_s=0)


def test_waits_are_measured_with_the_given_clock():
    ticks = iter(range(100))
    limiter = RateLimiter(1, clock=lambda: next(ticks))
    assert limiter.produced(1) == 1  # one tick between entering and leaving
    assert limiter.stats().producer_wait_s == 1


def test_counts_survive_a_trip_through_json():
    limiter, resumed = RateLimiter(3), RateLimiter(3)
    limiter.produced(2)
    resumed.load_state_dict(json.loads(json.dumps(limiter.state_dict())))
    resumed.produced(1, timeout_s=0)
    resumed.consume(timeout_s=0)
    assert resumed.stats().produced == 3


@pytest.mark.parametrize("wrong", [{"samples_per_batch": -1}, {"watermark": -1}, {"max_staleness": -1}])
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: got -1"):
        RateLimiter(**{"samples_per_batch": 2, **wrong})


@pytest.mark.parametrize("staleness", [1.5, math.nan, True, "2"])
def test_an_age_is_a_whole_number_of_versions(staleness):
    with pytest.raises(ValueError, match="needs a whole number of at least 0"):
        RateLimiter(2, max_staleness=staleness)


@pytest.mark.parametrize("count", [0, -1, 1.5, math.nan, math.inf, "2"])
@pytest.mark.parametrize("name", ["produced", "consume", "discard"])
def test_counts_that_are_no_positive_whole_numbers_are_refused_and_change_nothing(name, count):
    limiter = RateLimiter(2)
    before = limiter.state_dict()
    with pytest.raises(ValueError, match="needs a whole number of at least 1"):
        getattr(limiter, name)(count)
    assert limiter.state_dict() == before


def test_numpys_whole_numbers_are_counted_as_plain_ones():
    limiter = RateLimiter(2)
    limiter.produced(np.int64(2))
    limiter.consume(np.int64(1))
    assert json.loads(json.dumps(limiter.state_dict()))["produced"] == 2
