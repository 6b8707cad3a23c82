"""Sampling beside training: which prompts are trained on, stopped or not, in whatever order units finish."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.base.errors import BackendMemoryError
from retrain.base.rollouts import Group, Prompt, Rollout
from retrain.config.flow import FlowSettings
from retrain.config.schema import DataSection
from retrain.trainer.batch import ScoredBatch
from retrain.trainer.prompts import Draw, PromptStream, open_stream
from retrain.trainer.refill import Refill
from retrain.trainer.source import AsyncSource

BOUND_S = 30  # only reached if the test fails
PROMPTS = [Prompt(number, str(number), "") for number in range(500)]


def sampled(prompts: Sequence[Prompt]) -> list[Group]:
    return [Group(prompt, (Rollout(prompt, "", (0,), np.zeros(1), ("",), False, 0),)) for prompt in prompts]


class FirstIsLast:
    """Samples; the first unit is done only after another one, so that units finish out of order."""

    def __init__(self) -> None:
        self._calls, self._lock, self._other = 0, threading.Lock(), threading.Event()

    def __call__(self, prompts: Sequence[Prompt]) -> list[Group]:
        with self._lock:
            self._calls += 1
            is_first = self._calls == 1
        if is_first:
            assert self._other.wait(BOUND_S)
        else:
            self._other.set()
        return sampled(prompts)


def opened(
    sample, workers: int, batch: int, unit: int, refill: Refill | None = None, **changes: object
) -> AsyncSource:
    flow = {"batch_size": batch, "capacity": 4 * max(batch, unit), "unit_size": unit, "max_staleness": 9}
    return AsyncSource(
        open_stream(PROMPTS, "shuffle", {}, 1),
        sample,
        FlowSettings(**{**flow, **changes}),
        refill,
        workers=workers,
        seed=0,
        overlaps=True,
    )


def ids(groups: Sequence[Group]) -> list[int]:
    return [int(group.prompt.id) for group in groups]


def drawn(stream: PromptStream, count: int) -> list[int]:
    """Return the ids of the next prompts."""
    return [int(stream.at(draw).id) for draw in stream.draw(count)]


def assert_cursor(source: AsyncSource, count: int) -> None:
    """So many prompts were drawn, and none is to be drawn again."""
    prompts = source.state_dict()["prompts"]
    assert (prompts["drawn"], prompts["sources"][""]["again"]) == (count, [])


def train(source: AsyncSource, steps: range, batch: int) -> list[int]:
    """Take steps, and give the prompts trained on."""
    trained: list[int] = []
    for step in steps:
        trained += ids(source.next_groups(batch, batch, step))
        with source.updating(step + 1):
            pass
    return trained


def assert_each_once(trained: list[int], source: AsyncSource) -> None:
    """Every prompt of the stream up to the cursor was trained on once, or is still to come."""
    cursor, stream = source.state_dict()["prompts"], open_stream(PROMPTS, "shuffle", {}, 1)
    to_come = [int(stream.at(Draw(*draw)).id) for draw in cursor["sources"][""]["again"]]
    assert sorted([*trained, *to_come]) == sorted(drawn(stream, cursor["drawn"]))


class SlowFirst:
    """Samples; the unit of the very first prompt is done once each other unit that may start is."""

    def __init__(self, others: int) -> None:
        self._slow, self._others, self._lock, self._done = None, others, threading.Lock(), threading.Event()

    def __call__(self, prompts: Sequence[Prompt]) -> list[Group]:
        with self._lock:
            is_slow = self._slow in (None, prompts[0])
            if is_slow:
                self._slow = prompts[0]
            else:
                self._others -= 1
            if self._others == 0:
                self._done.set()
        if is_slow:
            assert self._done.wait(BOUND_S)
        return sampled(prompts)


@pytest.mark.parametrize(("workers", "staleness"), [(2, 1), (4, 1), (4, 2), (8, 3), (16, 8)])
def test_a_slow_prompt_is_trained_on_in_its_turn(workers: int, staleness: int) -> None:
    """It is started once, and as many others are sampled before it as may be under way beside it."""
    source = opened(SlowFirst(others=staleness), workers, batch=3, unit=3, max_staleness=staleness)
    trained = train(source, range(12), 3)
    stream = open_stream(PROMPTS, "shuffle", {}, 1)
    assert trained == drawn(stream, 36)
    assert source.stats().dropped == 0
    source.close()


def test_what_got_stale_as_batches_shrank_is_counted_and_sampled_again() -> None:
    source = opened(sampled, workers=1, batch=4, unit=4, max_staleness=1)
    trained, step = [], 0
    while source.stats().dropped == 0:
        trained += train(source, range(step, step + 1), 4 if step == 0 else 1)
        step += 1
    trained += train(source, range(step, step + 8), 4)
    source.close()
    assert_each_once(trained, source)


@pytest.mark.parametrize("buffer", ["fifo", "firo"])
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_each_prompt_is_trained_on_once_though_units_finish_out_of_order(buffer: str, stop: int) -> None:
    first = opened(FirstIsLast(), workers=3, batch=4, unit=2, buffer=buffer)
    trained = train(first, range(stop), 4)
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    resumed = opened(FirstIsLast(), workers=3, batch=4, unit=2, buffer=buffer)
    resumed.load_state_dict(state)
    trained += train(resumed, range(stop, 6), 4)
    resumed.close()
    assert_each_once(trained, resumed)


@pytest.mark.parametrize("staleness", [1, 4])
def test_nothing_is_sampled_that_no_step_takes(staleness: int) -> None:
    source = opened(sampled, workers=2, batch=4, unit=2, max_staleness=staleness, steps=5)
    trained = train(source, range(5), 4)
    source.close()
    assert_cursor(source, len(trained))


def test_a_run_that_waits_at_a_rung_samples_nothing_that_comes_after_it() -> None:
    source = opened(sampled, workers=2, batch=4, unit=2, max_staleness=3, steps=20)
    source.end_at(3)
    train(source, range(3), 4)
    assert source.state_dict()["prompts"]["drawn"] == 12
    train(source, range(3, 5), 4)  # it went on before it was told
    assert source.state_dict()["prompts"]["drawn"] == 20
    source.end_at(8)
    train(source, range(5, 8), 4)
    source.close()
    assert_cursor(source, 32)


def test_a_source_that_is_held_samples_only_for_the_step_that_is_taken() -> None:
    source = opened(sampled, workers=2, batch=4, unit=2, max_staleness=3, steps=20)
    source.hold(True)
    for step in range(4):
        assert source.most_groups(1, held=True) == 4
        train(source, range(step, step + 1), 4)
        assert source.most_groups(0, held=True) == 0
        assert source.state_dict()["prompts"]["drawn"] == 4 * (step + 1)
    assert source.most_groups(0, held=False) == 4 * (3 + 1)
    assert source.most_groups(1, held=False) == 4 * (3 + 2)
    source.hold(False)
    ahead = train(source, range(4, 9), 4)
    source.close()
    assert len(ahead) == 20


class Ties:
    """Scores groups and times nothing: of each three prompts, two have a group that ties."""

    def __init__(self) -> None:
        self.scored = 0

    def __call__(self, groups: Sequence[Group], step: int, *, is_part: bool = False) -> ScoredBatch:
        self.scored += len(groups)
        rewards = [[0.0, float(group.prompt.id % 3 == 0)] for group in groups]
        return ScoredBatch(groups, np.array(rewards))

    def part(self, name: str) -> nullcontext[None]:
        return nullcontext()


@pytest.mark.parametrize("unit", [3, 4])
def test_after_a_refill_as_much_is_sampled_ahead_as_after_a_whole_batch(unit: int) -> None:
    """Though the last request of the step was for few groups, if for any."""
    ties = Ties()
    source = opened(
        sampled,
        workers=2,
        batch=4,
        unit=unit,
        refill=Refill(DataSection(refill="tied"), ties, ties),
        max_staleness=1,
        steps=9,
    )
    source.hold(True)
    for step in range(4):
        at_most = source.state_dict()["prompts"]["drawn"] + source.most_groups(1, held=True)
        train(source, range(step, step + 1), 4)
        drawn = source.state_dict()["prompts"]["drawn"]
        assert drawn <= at_most
        assert source.most_groups(0, held=False) == 2 * 4 - (drawn - ties.scored)
    source.close()


@pytest.mark.parametrize("stop", [1, 2, 5])
def test_steps_have_the_prompts_of_the_plain_loop_also_after_a_resume(stop: int) -> None:
    first = opened(FirstIsLast(), workers=4, batch=4, unit=2, max_staleness=2)
    trained = train(first, range(stop), 4)
    state = json.loads(json.dumps(first.state_dict()))
    first.close()
    resumed = opened(FirstIsLast(), workers=4, batch=4, unit=2, max_staleness=2)
    resumed.load_state_dict(state)
    trained += train(resumed, range(stop, 8), 4)
    resumed.close()
    assert trained == drawn(open_stream(PROMPTS, "shuffle", {}, 1), 32)


@settings(max_examples=30, deadline=None)
@given(
    workers=st.integers(1, 4),
    batch=st.integers(1, 4),
    unit=st.integers(1, 4),
    stops=st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_nothing_is_lost_and_nothing_comes_twice_however_often_a_run_is_stopped(
    workers: int, batch: int, unit: int, stops: list[int]
) -> None:
    trained, step, source = [], 0, opened(sampled, workers, batch, unit)
    for steps in stops:
        trained += train(source, range(step, step + steps), batch)
        state, step = json.loads(json.dumps(source.state_dict())), step + steps
        source.close()
        source = opened(sampled, workers, batch, unit)
        source.load_state_dict(state)
    assert_each_once(trained, source)


def test_a_batch_that_did_not_fit_is_sampled_again_before_anything_else() -> None:
    source = opened(sampled, workers=1, batch=4, unit=4)
    first = train(source, range(1), 4)
    failed = ids(source.next_groups(4, 4, 1))
    source.put_back()
    again = ids(source.next_groups(2, 2, 1))
    assert again == failed[:2]
    assert not set(first) & set(failed)
    source.close()


def test_sampling_that_did_not_fit_repeats_nothing_of_the_step_before_it() -> None:
    too_large = {drawn(open_stream(PROMPTS, "shuffle", {}, 1), 5)[4]}

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        if too_large & {int(prompt.id) for prompt in prompts}:
            too_large.clear()
            raise BackendMemoryError("does not fit")
        return sampled(prompts)

    source = opened(sample, workers=1, batch=4, unit=1, max_staleness=0)
    trained = train(source, range(1), 4)
    with pytest.raises(BackendMemoryError):
        source.next_groups(4, 4, 1)
    source.put_back()
    trained += train(source, range(1, 4), 2)
    source.close()
    assert_each_once(trained, source)


def test_prompts_put_back_are_taken_first_and_across_epochs() -> None:
    stream = open_stream(PROMPTS, "shuffle", {}, 1)
    draws = stream.draw(510)
    stream.put_back([draws[505], draws[3]])
    assert stream.draw(2) == [draws[3], draws[505]]
    expected = drawn(open_stream(PROMPTS, "shuffle", {}, 1), 511)
    assert [stream.at(draw).id for draw in [*draws, *stream.draw(1)]] == expected


@pytest.mark.parametrize("unit", [4, 6])
def test_a_unit_that_does_not_fit_is_sampled_in_parts_and_those_after_it_as_well(unit: int) -> None:
    sizes: list[int] = []

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        sizes.append(len(prompts))
        if len(prompts) > 2:
            raise BackendMemoryError(f"{len(prompts)} prompts did not fit")
        return sampled(prompts)

    source = opened(sample, workers=1, batch=2, unit=unit)
    trained = train(source, range(12), 2)
    state = source.state_dict()
    source.close()
    assert_each_once(trained, source)
    assert [size for size in sizes if size > 2] == sizes[: len([size for size in sizes if size > 2])]
    resumed = opened(sample, workers=1, batch=2, unit=unit)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert resumed.stats().prompts_at_a_time <= 2
    resumed.close()


def test_a_step_that_did_not_fit_beside_sampling_halves_what_is_sampled_at_a_time() -> None:
    sizes: list[int] = []

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        sizes.append(len(prompts))
        return sampled(prompts)

    source = opened(sample, workers=1, batch=4, unit=4, steps=1)
    source.next_groups(4, 4, 0)
    sizes.clear()
    source.put_back()
    source.next_groups(2, 2, 0)
    assert set(sizes) == {2}
    assert source.stats().lost >= 4
    source.close()


def test_a_single_prompt_that_does_not_fit_ends_in_a_memory_error() -> None:
    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        raise BackendMemoryError("no room at all")

    source = opened(sample, workers=2, batch=2, unit=4)
    with pytest.raises(BackendMemoryError, match="no room at all"):
        source.next_groups(2, 2, 0)
    source.close()


def test_a_batch_that_did_not_fit_is_sampled_again_and_still_nothing_beyond_the_end():
    source = opened(sampled, workers=1, batch=2, unit=2)
    source.end_at(2)
    train(source, range(1), 2)
    source.next_groups(2, 2, 1)
    source.put_back()
    train(source, range(1, 2), 2)
    source.close()
    assert_cursor(source, 4)
