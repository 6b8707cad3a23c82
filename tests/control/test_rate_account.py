"""The pace: how many samples may come in and how many batches may go out."""

import json
import math

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.config.flow import FlowSettings, samples_per_batch
from retrain.control.rules.rate import RateAccount

PACES = st.floats(0.5, 20, allow_nan=False)


def settings(**changes):
    return FlowSettings(**{"batch_size": 4, "capacity": 16, **changes})


def walk(account, moves, largest):
    """Make every move that the account allows: positive numbers are samples, others a batch."""
    balances = []
    for move in moves:
        if move > 0 and account.may_produce():
            account.add(min(move, largest))
        elif move <= 0 and account.may_consume():
            account.take()
        if account.started:
            balances.append(account.balance)
    return balances


def test_the_pace_is_time_steps_over_batches_per_simulation():
    assert samples_per_batch(100, 25) == 4


@pytest.mark.parametrize("speed", [0, 0.0, None])
def test_a_speed_of_zero_or_none_turns_the_limiter_off(speed):
    assert samples_per_batch(100, speed) is None


@pytest.mark.parametrize("speed", [-1, math.nan, math.inf, True, False, "2"])
def test_any_other_speed_is_an_error(speed):
    with pytest.raises(ValueError, match="rate_limit_speed_batch_per_sim: got"):
        samples_per_batch(100, speed)


@pytest.mark.parametrize("pace", [-1.0, math.nan, math.inf])
def test_a_limiter_refuses_a_pace_that_is_not_positive_and_finite(pace):
    with pytest.raises(ValueError, match="samples_per_batch: got"):
        RateAccount(pace)


@given(pace=PACES, watermark=st.integers(0, 12), moves=st.lists(st.integers(-5, 5), max_size=300))
def test_the_balance_never_leaves_its_bounds(pace, watermark, moves):
    account = RateAccount(pace, watermark)
    assert all(-1e-6 <= balance < pace + 5 for balance in walk(account, moves, largest=5))


@given(pace=PACES, watermark=st.integers(0, 12), moves=st.lists(st.integers(-5, 5), max_size=300))
def test_at_least_one_side_may_always_go_on(pace, watermark, moves):
    account = RateAccount(pace, watermark)
    for move in moves:
        walk(account, [move], largest=5)
        assert account.may_produce() or account.may_consume()


@given(pace=PACES, asked=st.integers(1, 6))
def test_several_batches_asked_for_at_once_are_let_through(pace, asked):
    account = RateAccount(pace)
    while not account.may_consume(asked):
        assert account.may_produce(asked=asked)
        account.add(1)


@hypothesis.settings(max_examples=30)
@given(pace=st.floats(1, 20), bursts=st.lists(st.integers(1, 9), min_size=200, max_size=200))
def test_over_any_hundred_batches_the_ratio_is_within_five_percent_whatever_the_bursts(pace, bursts):
    account, produced_at = RateAccount(pace), []
    for burst in bursts:
        for _ in range(burst):
            if account.may_produce():
                account.add(1)
        while account.may_consume() and len(produced_at) < 250:
            account.take()
            produced_at.append(account.produced)
    windows = zip(produced_at, produced_at[100:], strict=False)
    assert all(abs((last - first) / (100 * pace) - 1) <= 0.05 for first, last in windows)


def test_nothing_is_consumed_below_the_watermark():
    account = RateAccount(2, watermark=5)
    account.add(4)
    assert account.may_produce()
    assert not account.may_consume()


def test_the_watermark_pays_for_the_first_batch_only():
    account = RateAccount(2, watermark=5)
    account.add(5)
    account.take()
    assert account.balance == 0


def test_without_a_pace_everything_is_counted_and_nothing_waits():
    account = RateAccount(0)
    account.add(7)
    account.take(3)
    assert (account.may_produce(), account.may_consume(), account.ratio) == (True, True, None)
    assert (account.produced, account.consumed) == (7, 3)


def test_discarded_samples_pay_for_nothing():
    account = RateAccount(3)
    account.add(3)
    account.discard(1)
    assert not account.may_consume()
    assert account.may_produce()


def test_the_ratio_is_one_when_samples_and_batches_match():
    account = RateAccount(3)
    for _ in range(6):
        account.add(1)
    account.take(2)
    assert account.ratio == 1


@given(moves=st.lists(st.integers(-3, 3), max_size=40))
def test_an_account_goes_on_from_its_state_in_json(moves):
    account, copy = RateAccount(2.5, watermark=3), RateAccount(2.5, watermark=3)
    walk(account, moves, largest=3)
    copy.load_state_dict(json.loads(json.dumps(account.state_dict())))
    assert copy == account


@pytest.mark.parametrize(
    "accepted",
    [
        settings(),
        settings(samples_per_batch=4),
        settings(samples_per_batch=4, watermark=16),
        settings(buffer="firo", threshold=4, samples_per_batch=4, watermark=8),
        settings(buffer="reservoir", samples_per_batch=1.5, watermark=4),
        settings(buffer="reservoir", samples_per_batch=4),
        settings(max_staleness=0),
        settings(max_staleness=1, unit_size=4),
    ],
)
def test_settings_that_can_go_on_for_ever_are_accepted(accepted):
    assert list(accepted.conflicts()) == []


@pytest.mark.parametrize(
    ("rejected", "reason"),
    [
        (settings(watermark=17), "training would never start"),
        (settings(capacity=3), "no batch could ever be read"),
        (settings(buffer="firo", threshold=13), "no batch could ever be read"),
        (settings(samples_per_batch=2), "reads each sample once"),
        (settings(samples_per_batch=8), "reads each sample once"),
        (settings(buffer="reservoir", samples_per_batch=5), "unseen samples would fill it"),
        (settings(buffer="reservoir", samples_per_batch=2), "stop before the first batch"),
        (settings(buffer="firo", threshold=4, samples_per_batch=4), "near its watermark"),
        (settings(max_staleness=0, unit_size=8), "stale before training reads them"),
        (settings(max_staleness=0, watermark=8), "stale before training reads them"),
        (settings(buffer="firo", threshold=5, max_staleness=1), "stale before training reads them"),
        (settings(threshold=1), "only the firo buffer"),
    ],
)
def test_settings_that_would_deadlock_or_lose_their_pace_are_rejected_with_the_reason(rejected, reason):
    ((_, what),) = rejected.conflicts()
    assert reason in what


def test_all_problems_are_listed_at_once():
    assert len(list(settings(watermark=99, samples_per_batch=9).conflicts())) == 2
