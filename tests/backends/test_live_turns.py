"""Turns that are sampled while others are: answered when they end, the same whichever are beside them."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from retrain.backends import Backend, BackendSpec, Optimization, Sampling
from retrain.backends.metering import Meter
from retrain.backends.numpy import CONTEXT, connect
from retrain.backends.numpy.policy import NumpyBackend
from retrain.backends.progress import EpisodeProgress
from retrain.backends.rows import LiveTurn, RowAdmission, Taken, TurnFeed, unsampled
from retrain.base.errors import BackendMemoryError, ConfigError, InterruptedRunError, PromptError
from retrain.base.event_loop import begun
from retrain.base.rollouts import FirstTurn, Loss, NextTurn, Prompt, Rollout, TrainingSample
from retrain.config.load import parse
from retrain.config.schema import EnvironmentSection
from retrain.plugins.losses import ppo
from retrain.records.spending import Tokens
from retrain.trainer.episodes import Episodes, summary_of
from retrain.trainer.metered import MeteredBackend
from retrain.trainer.opening import sampler_of
from retrain.trainer.turn_sampling import SampleTurns, TurnQueue
from tests.feeds import Script
from tests.plugins.test_environments import Count

HOW = Sampling(group_size=1, max_tokens=120, temperature=1.0, seed=7)
LONG = replace(HOW, max_tokens=1000)
PATIENCE_S = 60.0


def policy(*, ends: bool = True) -> NumpyBackend:
    backend = connect(BackendSpec(seed=0, alphabet="0123456789<>?", options={"dtype": "float64"}))
    if not ends:
        backend.weights["output_bias"][-1] = -1e9  # turns are as long as their limits
    return backend


def asked(text: str, limit: int) -> FirstTurn:
    return FirstTurn(Prompt(0, text, ""), limit)


def again(limit: int, times: int) -> Callable[[int, Rollout], NextTurn | None]:
    def follow(stream: int, rollout: Rollout) -> NextTurn | None:
        return NextTurn(rollout, (("user", "<"),), limit) if len(rollout.given) < times - 1 else None

    return follow


def never(asked: Sequence[object], how: Sampling) -> list[Taken]:
    raise AssertionError("turns are fed")


NOT_USED: SampleTurns = never


def test_a_turn_is_answered_when_it_ends_and_the_next_one_joins_those_under_way():
    feed = Script(
        {0: asked("?", 40), 10: asked("<", 2)}, lambda n, one: again(2, 5)(n, one) if n >= 10 else None
    )
    policy(ends=False).sample_turns(feed, HOW)
    assert [stream for stream, _ in feed.answers] == [10, 11, 12, 13, 14, 0]
    assert max(feed.under_way) == 2


def test_a_turn_draws_the_same_whichever_are_sampled_beside_it():
    backend, many = policy(), {10 * n: asked("?" * (n % 4), 2 + n) for n in range(12)}
    together = Script(many, again(3, 3))
    backend.sample_turns(together, HOW)
    for stream, turn in many.items():
        alone = Script({stream: turn}, again(3, 3))
        backend.sample_turns(alone, HOW)
        for number, rollout in alone.rollouts.items():
            assert rollout.tokens == together.rollouts[number].tokens
            assert np.allclose(rollout.logprobs, together.rollouts[number].logprobs, atol=1e-12)
    assert len({rollout.tokens for rollout in together.rollouts.values()}) > 12


def test_turns_that_come_and_go_have_the_log_probabilities_of_training():
    backend = policy()
    feed = Script({10 * n: asked("?" * (n % 4), 2 + n % 7) for n in range(16)}, again(4, 3))
    backend.sample_turns(feed, HOW)
    whole = [feed.rollouts[10 * n + 2] for n in range(16)]
    count = sum(len(one.tokens) for one in whole)
    samples = [TrainingSample(one, np.ones(len(one.tokens)), 1.0 / count) for one in whole]
    stats = backend.update(samples, Loss("ppo", ppo.evaluate), Optimization(lr=1e-3))
    assert stats.loss == pytest.approx(-1.0, abs=1e-9)  # every ratio is 1
    assert stats.approx_kl == pytest.approx(0.0, abs=1e-12)


def test_a_turn_that_cannot_be_read_or_has_no_room_is_answered_so():
    feed = Script({0: asked("?", 3), 10: asked("?" * (CONTEXT + 1), 3), 20: asked("x", 3)})
    policy().sample_turns(feed, HOW)
    found = dict(feed.answers)
    assert isinstance(found[0], Rollout)
    assert [type(found[n]).__name__ for n in (10, 20)] == ["FullContextError", "PromptError"]
    long = Script({0: asked("?" * CONTEXT, 1)}, again(1, 2))
    policy(ends=False).sample_turns(long, HOW)
    assert long.answers[-1] == (1, None)


def test_rows_wait_until_they_have_lost_what_it_costs_to_join():
    admission = RowAdmission()
    assert [admission.is_due(1, 3) for _ in range(5)] == [False, False, False, True, False]
    assert RowAdmission().is_due(1, 0)


class Told(Count):
    """Answers with what it is told to, and ends after four turns."""

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.turns += 1
        return "<", float(len(completion)), self.turns == 4


def play(
    backend: NumpyBackend, open_episode: Callable[[], object], how: Sampling = HOW, **options: object
) -> list[Rollout]:
    table = {"max_turns": 6, "max_turn_tokens": 30, "time_limit_s": PATIENCE_S}
    sample_live = options.pop("sample_live", backend.sample_turns)
    episodes = Episodes(
        EnvironmentSection(**table), open_episode, NOT_USED, sample_live=sample_live, **options
    )
    try:
        groups = episodes.play([Prompt(n, "?" * (1 + n % 3), "") for n in range(12)], how)
    finally:
        episodes.close()
    return [rollout for group in groups for rollout in group.rollouts]


def test_plain_functions_of_any_speed_have_the_same_turns_sampled_together():
    chance, backend = random.Random(0), policy()

    class Late(Told):
        def step(self, completion: str) -> tuple[str, float, bool]:
            time.sleep(chance.choice([0, 0, 0.002, 0.06]))  # the last is what another thread goes on with
            return super().step(completion)

    def noted(seen: list[tuple[int, int]]) -> Callable[[TurnFeed, Sampling], None]:
        def sample(feed: TurnFeed, how: Sampling) -> None:
            class Noted:
                def take(self, under_way: int) -> Sequence[LiveTurn]:
                    taken = feed.take(under_way)
                    seen.append((under_way, len(taken)))
                    return taken

                def answer(self, taken: Sequence[tuple[LiveTurn, Taken]]) -> None:
                    feed.answer(taken)

            backend.sample_turns(Noted(), how)

        return sample

    batches: list[list[tuple[int, int]]] = [[], []]
    quick, late = (
        play(backend, episode, replace(HOW, group_size=2), sample_live=noted(seen))
        for episode, seen in zip((Told, Late), batches, strict=True)
    )
    assert batches[0] == batches[1]
    assert len([1 for under_way, taken in batches[0] if under_way and taken]) > 1  # some join others
    assert [one.tokens for one in quick] == [one.tokens for one in late]
    assert all((a.logprobs == b.logprobs).all() for a, b in zip(quick, late, strict=True))


def test_a_coroutine_s_next_turn_does_not_wait_for_other_turns():
    joined = []

    class Awaited(Told):
        async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
            return super().step(completion)

    class Patient:
        """Samples no further token before every episode that was answered has asked for its next turn."""

        def __init__(self, feed: TurnFeed) -> None:
            self.feed, self.due = feed, 0

        def take(self, under_way: int) -> Sequence[LiveTurn]:
            taken = list(self.feed.take(under_way))
            until_s = time.monotonic() + PATIENCE_S
            while under_way and len(taken) < self.due and time.monotonic() < until_s:
                taken += self.feed.take(under_way)
            if under_way:
                joined.append((len(taken), self.due))
            self.due = 0
            return taken

        def answer(self, taken: Sequence[tuple[LiveTurn, Taken]]) -> None:
            self.due += sum(isinstance(one, Rollout) and len(one.given) < 3 for _, one in taken)
            self.feed.answer(taken)

    backend = policy()
    play(backend, Awaited, LONG, sample_live=lambda feed, how: backend.sample_turns(Patient(feed), how))
    assert sum(taken for taken, _ in joined) > 12
    assert all(taken == due for taken, due in joined)


def test_a_stop_interrupts_the_turns_under_way():
    looks = iter([False] * 10)

    with pytest.raises(InterruptedRunError, match="while episodes were played"):
        play(policy(ends=False), Told, is_leaving=lambda: next(looks, True))


def test_an_error_of_the_policy_ends_the_play():
    def broken(feed: TurnFeed, how: Sampling) -> None:
        feed.take(0)
        raise BackendMemoryError("too many")

    with pytest.raises(BackendMemoryError, match="too many"):
        play(policy(), Told, sample_live=broken)


def test_a_play_that_fails_ends_though_turns_are_under_way():
    def failing(progress: EpisodeProgress) -> None:
        if progress.turns:
            raise ValueError("cannot be shown")

    with pytest.raises(ValueError, match="cannot be shown"):
        play(policy(), Told, observe=failing)


def test_progress_and_waiting_are_counted():
    told: list[EpisodeProgress] = []

    class Slow(Told):
        async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
            await asyncio.sleep(0.02)
            return super().step(completion)

    rollouts = play(policy(), Slow, LONG, observe=told.append)
    last = max(told, key=lambda one: (one.finished, one.turns))
    assert (last.episodes, last.finished, last.turns) == (12, 12, 48)
    assert last.tokens == sum(len(one.tokens) for one in rollouts)
    summary = summary_of(rollouts)
    assert summary
    assert 0 < summary.environment_wait_s < last.time_s + 1


def test_unreadable_turns_cost_their_episodes():
    class Strange(Told):
        def start(self, prompt: Prompt) -> str:
            return "x" if prompt.id == 3 else prompt.text

    errors = [one.episode.error for one in play(policy(), Strange) if one.episode]
    assert [number for number, error in enumerate(errors) if error] == [3]
    assert "'x'" in errors[3]


def test_a_backend_with_a_price_counts_each_turn():
    meter, backend = Meter(), policy(ends=False)
    priced = MeteredBackend(backend, meter)
    feed = Script({0: asked("???", 5), 10: asked("x", 5)}, again(2, 2))
    sample = priced.sample_turns
    assert sample is not None
    sample(feed, HOW)
    assert isinstance(dict(feed.answers)[10], PromptError)
    # a prompt of 3, then 5 + 2 sampled, one read, and 8 from the cache
    assert (meter.tokens, meter.open, meter.unsure) == (Tokens(4, 8, 7), Tokens(), Tokens())


def test_a_call_that_cannot_be_made_costs_nothing():
    """As its prompt cannot be read, or as it does not fit in memory, after which a smaller one is made."""
    meter, backend = Meter(), policy()
    priced = MeteredBackend(backend, meter)
    with pytest.raises(PromptError):
        priced.extend([NextTurn(unsampled(Prompt(0, "?", ""), 0), (("user", "x"),), 4)], HOW)
    backend.sample = backend.update = full  # type: ignore[method-assign]
    for call in (
        lambda: priced.sample([Prompt(0, "?", "")], HOW),
        lambda: priced.update([], Loss("", ppo.evaluate), Optimization(0.1)),
    ):
        with pytest.raises(BackendMemoryError):
            call()
    assert (meter.tokens, meter.open, meter.unsure) == (Tokens(), Tokens(), Tokens())


def full(*_: object) -> None:
    raise BackendMemoryError("no room")


@pytest.mark.parametrize("has_price", [False, True])
def test_a_backend_that_cannot_append_to_a_turn_is_told_before_the_first_step(has_price):
    backend: Backend = policy()  # as if it could not append to a turn
    backend.info = replace(backend.info, extends=False)
    if has_price:
        backend = MeteredBackend(backend, Meter())
    config = parse({"environment": {"environment": "guess"}}, "c")
    with ExitStack() as opened:
        with pytest.raises(ConfigError, match="backend 'numpy' cannot append to a turn; set separate_turns"):
            sampler_of(config, backend, opened)
        apart = replace(config, environment=replace(config.environment, separate_turns=True))
        assert sampler_of(apart, backend, opened)


def test_turns_that_a_stop_interrupts_may_have_been_billed():
    class Stops(Script):
        def take(self, under_way: int) -> Sequence[LiveTurn]:
            if under_way:
                raise InterruptedRunError("stop")
            return super().take(under_way)

    meter = Meter()
    sample = MeteredBackend(policy(ends=False), meter).sample_turns
    assert sample is not None
    with pytest.raises(InterruptedRunError):
        sample(Stops({0: asked("?", 5)}), HOW)
    assert (meter.tokens, meter.open, meter.unsure) == (Tokens(), Tokens(), Tokens(prefill=1, sample=5))


def test_a_call_counts_with_all_that_it_may_be_billed_while_its_end_is_unknown():
    told: list[Tokens] = []
    meter = Meter(lambda one: told.append(one.open))
    priced = MeteredBackend(policy(ends=False), meter)
    how = replace(HOW, group_size=3, max_tokens=2)
    (group, _) = priced.sample([Prompt(0, "??", ""), Prompt(1, "<", "")], how)
    priced.extend([NextTurn(group.rollouts[0], (("user", "><"),), 4)], replace(how, group_size=1))
    assert [one for one in told if one != Tokens()] == [Tokens(3, 6, 12), Tokens(2, 4, 4)]
    assert meter.tokens == Tokens(3, 6, 12) + Tokens(2, 4, 4)


async def turns_of_the_loop(*_: object) -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def nothing(*_: object) -> None:
    """Answer at once."""


def test_nothing_is_settled_before_those_who_are_answered_have_taken_their_turn():
    is_waiting, found = threading.Event(), []  # the thread that samples, for a report; and what it got
    queue, rollout = TurnQueue(lambda: bool(is_waiting.set())), unsampled(Prompt(0, "", ""), 0)

    async def episode() -> None:
        ask = queue.of_episode(0)
        await ask(asked("?", 1))
        await queue.held(turns_of_the_loop, lambda: None, print)
        await ask(asked("<", 1))

    async def answered_while_another_call_ends() -> None:
        playing = asyncio.ensure_future(episode())
        await turns_of_the_loop()
        (request,) = queue.come()
        is_waiting.clear()
        settled = begun(lambda: queue.answer([request], [rollout]) or queue.settled())
        assert is_waiting.wait(PATIENCE_S)  # so that the loop is told of both before it goes on
        await queue.held(nothing, lambda: None, print)  # its end has requests passed on
        found.extend(await asyncio.wrap_future(settled))
        playing.cancel()

    asyncio.run(answered_while_another_call_ends())
    assert [one.place for one in found] == [(0, 1)]
