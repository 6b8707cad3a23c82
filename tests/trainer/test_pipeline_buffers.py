"""The buffer: which sample is read next, and whether it stays."""

import json

import pytest

from retrain.config.flow import FlowSettings
from retrain.trainer.pipeline import Buffer, VersionedItem

CRITICAL = {7: 18.475, 9: 21.666, 19: 36.191}  # of chi squared at 1 % by degrees of freedom: the usual tables


def opened(kind, capacity, seed=0, threshold=0):
    return Buffer(FlowSettings(batch_size=1, capacity=capacity, buffer=kind, threshold=threshold), seed)


def filled(buffer, items):
    for item in items:
        buffer.put(VersionedItem(item, version=item))
    return buffer


def read(buffer, size, **how):
    return [sample.item for sample in buffer.take(size, **how)]


def test_fifo_reads_each_sample_once_in_order():
    buffer = filled(opened("fifo", 4), [1, 2, 3])
    assert (read(buffer, 2), read(buffer, 1), len(buffer)) == ([1, 2], [3], 0)


def test_firo_reads_each_sample_once():
    buffer = filled(opened("firo", 10, seed=1), range(10))
    assert sorted(read(buffer, 4) + read(buffer, 6)) == list(range(10))


def test_firo_keeps_its_threshold_behind():
    assert opened("firo", 10, threshold=3).needed(4) == 7


def are_equally_likely(counts):
    """Whether counts as unequal have a chance above 1 % where all are equally likely (Pearson)."""
    expected = sum(counts) / len(counts)
    return sum((count - expected) ** 2 / expected for count in counts) < CRITICAL[len(counts) - 1]


def test_firo_draws_every_sample_with_the_same_probability():
    counts = [0] * 10
    for seed in range(2000):
        for item in read(filled(opened("firo", 10, seed=seed), range(10)), 3):
            counts[item] += 1
    assert are_equally_likely(counts)


def test_reservoir_draws_seen_and_unseen_samples_with_the_same_probability():
    buffer, counts = filled(opened("reservoir", 20, seed=5), range(20)), [0] * 20
    for _ in range(2000):
        for item in read(buffer, 4):
            counts[item] += 1
    assert are_equally_likely(counts)


def test_reservoir_evicts_every_seen_sample_with_the_same_probability():
    counts = [0] * 8
    for seed in range(2000):
        buffer = filled(opened("reservoir", 8, seed=seed), range(8))
        read(buffer, 8)
        buffer.put(VersionedItem(8, 8))
        (evicted,) = set(range(9)) - set(read(buffer, 8))
        counts[evicted] += 1
    assert are_equally_likely(counts)


def test_a_batch_of_a_reservoir_holds_different_samples():
    buffer = filled(opened("reservoir", 8, seed=2), range(8))
    assert all(len(set(read(buffer, 6))) == 6 for _ in range(50))


def test_a_reservoir_keeps_what_it_reads():
    buffer = filled(opened("reservoir", 8), range(5))
    read(buffer, 3)
    assert (len(buffer), buffer.unseen) == (5, 2)


def test_a_full_reservoir_evicts_only_samples_already_seen():
    buffer = filled(opened("reservoir", 4, seed=3), range(4))
    seen = set(read(buffer, 2))
    filled(buffer, [4, 5])
    assert set(read(buffer, 4)) == {0, 1, 2, 3, 4, 5} - seen


def test_a_full_reservoir_without_a_seen_sample_has_no_room():
    buffer = filled(opened("reservoir", 3), range(3))
    assert not buffer.has_room
    with pytest.raises(OverflowError, match="has_room"):
        buffer.put(VersionedItem(3, 3))


@pytest.mark.parametrize("kind", ["fifo", "firo", "reservoir"])
def test_old_samples_are_dropped_and_the_unseen_ones_counted(kind):
    buffer = filled(opened(kind, 8), range(8))
    assert len(buffer.drop_older_than(5)) == 5
    assert sorted(read(buffer, 3)) == [5, 6, 7]


def test_seen_samples_that_get_old_leave_without_being_counted():
    buffer = filled(opened("reservoir", 4), range(4))
    read(buffer, 4)
    assert (buffer.drop_older_than(9), len(buffer)) == ([], 0)


@pytest.mark.parametrize("kind", ["firo", "reservoir"])
def test_random_reads_go_on_from_a_state_in_json(kind):
    one = opened(kind, 50, seed=7)
    read(filled(one, range(10)), 10)
    one.drop_older_than(10)
    other = opened(kind, 50)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert read(filled(one, range(30)), 20) == read(filled(other, range(30)), 20)
