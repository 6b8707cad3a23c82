"""Sampling beside training with real producer threads; events and barriers order them, never pauses."""

from __future__ import annotations

import itertools
import json
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from retrain.base.rollouts import Group, Prompt
from retrain.config.flow import FlowSettings
from retrain.records.run_state import read_attempts
from retrain.trainer import source as module
from retrain.trainer import worker
from retrain.trainer.pipeline import ClosedError, Monitor
from retrain.trainer.prompts import open_stream
from retrain.trainer.source import AsyncSource
from tests.stopping import StopAfterStep
from tests.stuck_sampling import AFTER_SAVING
from tests.trainer.test_async_source import BOUND_S, PROMPTS, drawn, ids, sampled, train
from tests.trainer.test_trainer import SMALL, make_run

ORDER = drawn(open_stream(PROMPTS, "shuffle", {}, 1), 400)


def unopened(sample=sampled, *, workers: int = 1, overlaps: bool = True, **changes: object) -> AsyncSource:
    settings = FlowSettings(**{"batch_size": 4, "capacity": 8, **changes})
    stream = open_stream(PROMPTS, "shuffle", {}, 1)
    return AsyncSource(stream, sample, settings, workers=workers, seed=0, overlaps=overlaps)


@contextmanager
def opened(
    sample: Callable[[Sequence[Prompt]], list[Group]] = sampled, **how: object
) -> Iterator[AsyncSource]:
    source = unopened(sample, **how)
    try:
        yield source
    finally:
        source.close()


def test_every_prompt_is_trained_on_once_and_in_order() -> None:
    with opened() as source:
        assert train(source, range(5), 4) == ORDER[:20]


def test_several_workers_sample_at_once() -> None:
    meeting = threading.Barrier(3)

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        meeting.wait(BOUND_S)  # passes only if three threads are in here together
        return sampled(prompts)

    with opened(sample, batch_size=3, capacity=3, max_staleness=0, workers=3) as source:
        assert ids(source.next_groups(3, 3, 0)) == ORDER[:3]


def test_sampling_goes_on_while_training() -> None:
    is_training, was_sampled = threading.Event(), threading.Event()
    numbers = itertools.count()

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        if next(numbers) >= 4:  # not part of the first batch
            is_training.wait(BOUND_S)
            was_sampled.set()
        return sampled(prompts)

    with opened(sample, max_staleness=1) as source:
        source.next_groups(4, 4, 0)
        is_training.set()
        assert was_sampled.wait(BOUND_S)  # training does not go on until sampling did


def test_without_staleness_every_prompt_is_sampled_by_the_current_policy() -> None:
    policy, sampled_by = [0], []

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        sampled_by.append(policy[0])
        return sampled(prompts)

    with opened(sample, max_staleness=0, workers=2, steps=20) as source:
        for version in range(20):
            source.next_groups(4, 4, version)
            with source.updating(version + 1):
                policy[0] = version + 1
    assert sampled_by == [version for version in range(20) for _ in range(4)]
    assert source.stats().dropped == 0


def test_an_update_lets_sampling_go_on_before_the_next_batch_is_asked_for() -> None:
    is_updated, was_sampled = threading.Event(), threading.Event()

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        if is_updated.is_set():
            was_sampled.set()
        return sampled(prompts)

    with opened(sample, max_staleness=0) as source:
        source.next_groups(4, 4, 0)
        with source.updating(1):
            is_updated.set()
        assert was_sampled.wait(BOUND_S)


def test_ages_stay_within_the_bound() -> None:
    with opened(max_staleness=2, unit_size=4, capacity=16, workers=2) as source:
        for version in range(30):
            train(source, range(version, version + 1), 4)
            assert 0 <= source.stats().sample_age_mean <= source.stats().sample_age_max <= 2


def test_samples_that_got_stale_while_sampled_are_dropped_counted_and_sampled_again() -> None:
    is_sampling, may_go_on = threading.Event(), threading.Event()

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        if prompts[0].id == ORDER[1] and not may_go_on.is_set():
            is_sampling.set()
            may_go_on.wait(BOUND_S)
        return sampled(prompts)

    with opened(sample, batch_size=1, max_staleness=1) as source:
        source.next_groups(1, 1, 0)
        is_sampling.wait(BOUND_S)
        with source.updating(5):
            may_go_on.set()
        assert ids(source.next_groups(1, 1, 5)) == [ORDER[2]]
        assert source.stats().dropped == 1
        trained = train(source, range(5, 9), 1)
    assert trained.count(ORDER[1]) == 1


def test_what_a_producer_raises_reaches_the_trainer_with_its_traceback() -> None:
    def fails_here(_: Sequence[Prompt]) -> list[Group]:
        raise ConnectionError("the sampler went away")

    with opened(fails_here) as source, pytest.raises(ConnectionError, match="went away") as caught:
        source.next_groups(4, 4, 0)
    assert "fails_here" in [frame.name for frame in traceback.extract_tb(caught.tb)]


def test_the_failure_of_one_producer_wakes_a_waiting_trainer() -> None:
    others_sample, is_over = threading.Event(), threading.Event()
    turn = itertools.count()

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        if next(turn) == 0:
            others_sample.wait(BOUND_S)
            raise OSError("one of two")
        others_sample.set()
        is_over.wait(BOUND_S)
        return sampled(prompts)

    with opened(sample, workers=2) as source:
        with pytest.raises(OSError, match="one of two"):
            source.next_groups(4, 4, 0)
        is_over.set()


def test_after_a_failure_nothing_is_sampled_until_the_step_is_put_back() -> None:
    calls = itertools.count()

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        if next(calls) == 0:
            raise OSError("once")
        return sampled(prompts)

    with opened(sample, unit_size=4, workers=2) as source:
        with pytest.raises(OSError, match="once"):
            source.next_groups(4, 4, 0)
        with pytest.raises(OSError, match="once"):
            source.next_groups(4, 4, 0)
        source.put_back()
        assert train(source, range(2), 4) == ORDER[:8]


def waiting(source: AsyncSource) -> tuple[threading.Thread, list[BaseException]]:
    """Start a thread that asks for a batch; return it with what it raises."""
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            source.next_groups(4, 4, 0)
        except ClosedError as error:
            raised.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread, raised


def test_closing_wakes_a_waiting_trainer_and_leaves_a_stuck_producer_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampling, is_over = threading.Event(), threading.Event()

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        sampling.set()
        is_over.wait(BOUND_S)
        return sampled(prompts)

    source = unopened(sample)
    trainer, raised = waiting(source)
    sampling.wait(BOUND_S)
    monkeypatch.setattr(module, "CLOSING_S", 0.0)
    source.close()
    trainer.join(BOUND_S)
    (producer,) = (thread for thread in threading.enumerate() if thread.name == "producer-0")
    assert [str(error) for error in raised] == ["closed while waiting for samples to train on"]
    is_over.set()
    producer.join(BOUND_S)
    assert not producer.is_alive()


def test_a_machine_without_room_for_more_threads_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, itertools.count()

    def refuse_the_second(thread: threading.Thread) -> None:
        if next(started):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_the_second)
    with pytest.raises(RuntimeError, match="can't start new thread"), opened(workers=2) as source:
        source.next_groups(4, 4, 0)


def test_closing_ends_producers_that_wait_for_room() -> None:
    is_full = threading.Event()
    numbers = itertools.count()

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        if next(numbers) == 12:
            is_full.set()  # 4 were taken and 8 are in the buffer, so this one has no room
        return sampled(prompts)

    source = unopened(sample)
    source.next_groups(4, 4, 0)
    assert is_full.wait(BOUND_S)
    source.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "producer-0"]


def test_sampling_and_updating_never_overlap_where_they_must_not() -> None:
    inside, overlaps = [0], []

    def alone(prompts: Sequence[Prompt]) -> list[Group]:
        inside[0] += 1
        overlaps.append(inside[0])
        inside[0] -= 1
        return sampled(prompts)

    with opened(alone, max_staleness=1, workers=2, overlaps=False) as source:
        for version in range(30):
            source.next_groups(4, 4, version)
            with source.updating(version + 1):
                alone(())
    assert max(overlaps) == 1


@pytest.mark.parametrize("pace", [1, 2.5, 4])
def test_a_reservoir_holds_its_pace_over_any_hundred_batches(pace: float) -> None:
    produced = []
    with opened(buffer="reservoir", capacity=32, samples_per_batch=pace, watermark=8, workers=2) as source:
        for step in range(200):
            source.next_groups(4, 4, step)
            produced.append(source.stats().produced)
    windows = zip(produced, produced[100:], strict=False)
    assert all(abs((last - first) / (100 * pace) - 1) <= 0.05 for first, last in windows)


def test_stats_tell_what_a_calibration_needs() -> None:
    with opened(unit_size=8, steps=8, max_staleness=9, capacity=32) as source:
        train(source, range(8), 4)
        stats = source.stats()
    assert (stats.units, stats.batches, stats.batches_per_unit) == (4, 8, 2)


def test_idle_fractions_lie_between_zero_and_one() -> None:
    with opened() as source:
        source.next_groups(4, 4, 0)
        stats = source.stats()
    assert 0 <= stats.producer_idle_fraction <= 1
    assert 0 <= stats.consumer_idle_fraction <= 1


def test_the_waits_of_several_producers_add_up() -> None:
    looks: dict[str, list[int]] = {}
    ticks = itertools.count()

    def clock() -> float:
        """Count looks at the clock: the first of two begins a wait, the second ends it."""
        looks.setdefault(threading.current_thread().name, []).append(next(ticks))
        return looks[threading.current_thread().name][-1]

    source = unopened(workers=4, max_staleness=1)
    source._monitor = Monitor(clock)
    train(source, range(50), 4)
    source.close()
    waits = [
        end - begin
        for name, seen in looks.items()
        if name.startswith("producer-")
        for begin, end in zip(seen[::2], seen[1::2], strict=False)  # the last may have no end
    ]
    assert source.stats().producer_wait_s == sum(waits)


def test_a_resumed_source_goes_on_counting_and_counts_what_was_lost() -> None:
    with opened(unit_size=6, max_staleness=1, capacity=16) as source:
        first = train(source, range(1), 4)
    state = json.loads(json.dumps(source.state_dict()))
    with opened() as resumed:
        resumed.load_state_dict(state)
        assert [*first, *ids(resumed.next_groups(4, 4, 1))] == ORDER[:8]
        assert (resumed.stats().batches, resumed.stats().lost) == (2, source.stats().outstanding)


def test_settings_that_deadlock_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="reads each sample once"):
        unopened(samples_per_batch=2)


def test_a_run_that_stops_samples_nothing_after_its_checkpoint(tmp_path: Path) -> None:
    """Thousands of prompts may be sampled ahead, one at a time: the producer is never done with them."""
    endless = {"max_staleness": 5000, "capacity": 20_000, "nb_time_steps": 1}
    ahead = {"backend": {"backend": "tests.stuck_sampling.connect"}, "rate_limiter": endless}
    training = {"training": {**SMALL["training"], "max_steps": 5000, "save_every": 0}}
    files = make_run(tmp_path / "r", {**SMALL, **ahead, **training})
    assert worker.run(files.directory, StopAfterStep(files, step=1)) == 130
    assert "a checkpoint was saved" in read_attempts(files.attempts)[-1].message
    assert AFTER_SAVING == []
