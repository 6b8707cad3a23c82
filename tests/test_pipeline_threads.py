"""The pipeline with real producer threads; events and barriers order them, never pauses."""

import itertools
import json
import threading
import traceback

import pytest

from retrain.pipeline import ClosedError, FlowSettings
from retrain.pipeline.rollout_pipeline import RolloutPipeline

BOUND_S = 30  # only reached if the test fails


def settings(**changes):
    return FlowSettings(**{"batch_size": 4, "capacity": 8, **changes})


def counting(unit=1):
    """Return a producer of 0, 1, 2, ... in units."""
    numbers = itertools.count()
    return lambda version: list(itertools.islice(numbers, unit))


def test_every_item_arrives_once_and_in_order():
    with RolloutPipeline(counting(), settings()) as pipeline:
        batches = [pipeline.next_batch(4, step, BOUND_S).items for step in range(5)]
    assert list(itertools.chain(*batches)) == list(range(20))


def test_several_workers_produce_at_once():
    meeting = threading.Barrier(3)

    def produce(version):
        meeting.wait(BOUND_S)  # passes only if three threads are in here together
        return [version]

    with RolloutPipeline(produce, settings(batch_size=3), workers=3) as pipeline:
        batch = pipeline.next_batch(3, 0, BOUND_S)
        meeting.abort()
    assert batch.items == (0, 0, 0)


def test_sampling_goes_on_while_training():
    is_training, was_sampled = threading.Event(), threading.Event()
    numbers = itertools.count()

    def produce(version):
        if next(numbers) >= 4:  # not part of the first batch
            is_training.wait(BOUND_S)
            was_sampled.set()
        return [version]

    with RolloutPipeline(produce, settings(max_staleness=1)) as pipeline:
        pipeline.next_batch(4, 0, BOUND_S)
        is_training.set()
        assert was_sampled.wait(BOUND_S)  # training does not go on until sampling did


def test_without_staleness_every_item_is_of_the_current_policy():
    with RolloutPipeline(lambda version: [version], settings(max_staleness=0), workers=2) as pipeline:
        for version in range(20):
            assert pipeline.next_batch(4, version, BOUND_S).items == (version,) * 4
            pipeline.publish(version + 1)
    assert pipeline.stats().dropped == 0


def test_a_published_update_lets_sampling_go_on_before_the_next_batch_is_asked_for():
    sampled_with_update = threading.Event()

    def produce(version):
        if version == 1:
            sampled_with_update.set()
        return [version]

    with RolloutPipeline(produce, settings(max_staleness=0)) as pipeline:
        pipeline.next_batch(4, 0, BOUND_S)
        pipeline.publish(1)
        assert sampled_with_update.wait(BOUND_S)


def test_ages_stay_within_the_bound_and_match_the_items():
    with RolloutPipeline(
        lambda version: [version] * 4, settings(max_staleness=2, unit_size=4), workers=2
    ) as pipeline:
        for version in range(30):
            batch = pipeline.next_batch(4, version, BOUND_S)
            assert [version - item for item in batch.items] == list(batch.ages)
            assert max(batch.ages) <= 2
            pipeline.publish(version + 1)


def test_samples_that_got_stale_while_sampled_are_dropped_and_counted():
    sampled_at_0, may_go_on = threading.Event(), threading.Event()

    def produce(version):
        if version == 0:
            sampled_at_0.set()
            may_go_on.wait(BOUND_S)
        return [version]

    with RolloutPipeline(produce, settings(batch_size=1, max_staleness=1)) as pipeline:
        sampled_at_0.wait(BOUND_S)
        pipeline.publish(5)
        may_go_on.set()
        batch = pipeline.next_batch(1, 5, BOUND_S)
    assert (batch.items, batch.stale, pipeline.stats().dropped) == ((5,), (0,), 1)


def test_what_a_producer_raises_reaches_the_trainer_with_its_traceback():
    def fails_here(version):
        raise ConnectionError("the sampler went away")

    pipeline = RolloutPipeline(fails_here, settings())
    with pipeline, pytest.raises(ConnectionError, match="went away") as caught:
        pipeline.next_batch(4, 0, BOUND_S)
    assert "fails_here" in [frame.name for frame in traceback.extract_tb(caught.tb)]


def test_the_death_of_one_producer_wakes_a_waiting_trainer():
    others_sample, is_over = threading.Event(), threading.Event()
    turn = itertools.count()

    def produce(version):
        if next(turn) == 0:
            others_sample.wait(BOUND_S)
            raise OSError("one of two")
        others_sample.set()
        is_over.wait(BOUND_S)
        return []

    with RolloutPipeline(produce, settings(), workers=2) as pipeline:
        with pytest.raises(OSError, match="one of two"):
            pipeline.next_batch(4, 0, BOUND_S)
        is_over.set()


def test_closing_wakes_a_waiting_trainer_and_joins_the_producers():
    sampling, is_over = threading.Event(), threading.Event()

    def produce(version):
        sampling.set()
        is_over.wait(BOUND_S)
        return []

    pipeline = RolloutPipeline(produce, settings())
    pipeline.start()
    sampling.wait(BOUND_S)
    closer = threading.Thread(target=lambda: pipeline.close(0))
    closer.start()
    with pytest.raises(ClosedError):
        pipeline.next_batch(4, 0, BOUND_S)
    closer.join()
    is_over.set()
    assert pipeline.close(BOUND_S)


def test_closing_wakes_producers_that_wait_for_room():
    is_full = threading.Event()
    numbers = itertools.count()

    def produce(version):
        if next(numbers) == 8:
            is_full.set()  # 8 are in the buffer, this one has no room
        return [version]

    pipeline = RolloutPipeline(produce, settings())
    pipeline.start()
    assert is_full.wait(BOUND_S)
    assert pipeline.close(BOUND_S)


def test_closing_leaves_a_stuck_producer_behind_in_time():
    sampling, is_over = threading.Event(), threading.Event()

    def produce(version):
        sampling.set()
        return [is_over.wait(BOUND_S)]

    pipeline = RolloutPipeline(produce, settings())
    pipeline.start()
    assert sampling.wait(BOUND_S)
    assert not pipeline.close(timeout_s=0)
    is_over.set()
    assert pipeline.close(BOUND_S)


def test_a_batch_that_does_not_come_times_out():
    is_over = threading.Event()
    with RolloutPipeline(lambda version: [is_over.wait(BOUND_S)], settings()) as pipeline:
        with pytest.raises(TimeoutError, match="samples to train on"):
            pipeline.next_batch(4, 0, timeout_s=0)
        is_over.set()


def test_sampling_and_updating_never_overlap_that_share_a_lock():
    lock, inside, overlaps = threading.Lock(), [0], []

    def alone(answer):
        inside[0] += 1
        overlaps.append(inside[0])
        inside[0] -= 1
        return answer

    with RolloutPipeline(
        lambda version: alone([version]), settings(max_staleness=1), workers=2, exclusive=lambda: lock
    ) as pipeline:
        for version in range(30):
            pipeline.next_batch(4, version, BOUND_S)
            with lock:
                alone(None)
                pipeline.publish(version + 1)
    assert max(overlaps) == 1


@pytest.mark.parametrize("pace", [1, 2.5, 4])
def test_a_reservoir_holds_its_pace_over_any_hundred_batches(pace):
    produced = []
    flow = settings(buffer="reservoir", capacity=32, samples_per_batch=pace, watermark=8)
    with RolloutPipeline(counting(), flow, workers=2) as pipeline:
        for step in range(200):
            pipeline.next_batch(4, step, BOUND_S)
            produced.append(pipeline.stats().produced)
    windows = zip(produced, produced[100:], strict=False)
    assert all(abs((last - first) / (100 * pace) - 1) <= 0.05 for first, last in windows)


def test_stats_tell_what_a_calibration_needs():
    is_over, units = threading.Event(), counting(unit=8)

    def four_units(version):
        items = units(version)
        if items[0] >= 32:
            is_over.wait(BOUND_S)
        return items

    with RolloutPipeline(four_units, settings()) as pipeline:
        for step in range(8):
            pipeline.next_batch(4, step, BOUND_S)
        stats = pipeline.stats()
        is_over.set()
    assert (stats.units, stats.batches, stats.batches_per_unit) == (4, 8, 2)


def test_idle_fractions_lie_between_zero_and_one():
    with RolloutPipeline(counting(), settings()) as pipeline:
        pipeline.next_batch(4, 0, BOUND_S)
        stats = pipeline.stats()
    assert 0 <= stats.producer_idle_fraction <= 1
    assert 0 <= stats.consumer_idle_fraction <= 1


def test_a_resumed_pipeline_goes_on_counting_and_counts_what_was_lost():
    with RolloutPipeline(counting(unit=6), settings(unit_size=6, max_staleness=1)) as pipeline:
        pipeline.next_batch(4, 0, BOUND_S)
        pipeline.close(BOUND_S)
        state = json.loads(json.dumps(pipeline.state_dict()))
    under_way = pipeline.stats().outstanding
    resumed = RolloutPipeline(counting(), settings())
    resumed.load_state_dict(state)
    with resumed:
        assert resumed.next_batch(4, 1, BOUND_S).items == (0, 1, 2, 3)
    assert (resumed.stats().batches, resumed.stats().lost) == (2, under_way)


def test_settings_that_deadlock_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="reads each sample once"):
        RolloutPipeline(counting(), settings(samples_per_batch=2))


def test_a_pipeline_without_workers_is_refused():
    with pytest.raises(ValueError, match="workers: got 0"):
        RolloutPipeline(counting(), settings(), workers=0)
