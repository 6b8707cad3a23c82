"""Episodes: turns are sampled in batches, a failure costs its episode only, and rewards follow the table."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.backends import BackendSpec, Sampling
from retrain.backends.numpy import CONTEXT
from retrain.base import registry
from retrain.base.errors import ConfigError, InterruptedRunError, PromptError
from retrain.base.rollouts import Given, Group, NextTurn, Prompt, Rollout
from retrain.campaign.conformance import check_plugin
from retrain.config.load import parse
from retrain.config.schema import Config, EnvironmentSection
from retrain.plan.build import plan_runs
from retrain.plan.preflight import preflight
from retrain.plugins.environments import calls
from retrain.plugins.environments.calls import InTurn
from retrain.plugins.environments.guess import Game
from retrain.records.metrics import read_metrics
from retrain.records.samples import read_samples
from retrain.trainer import worker
from retrain.trainer.episodes import Episodes, summary_of
from retrain.trainer.opening import sampler_of
from retrain.trainer.turn_sampling import SampleTurns, TurnSampler
from tests.clocks import without_times
from tests.semaphore_processes import wait_until
from tests.stopping import StopAfterStep, StopAtLook
from tests.trainer.test_trainer import make_run

HOW = Sampling(group_size=2, max_tokens=100, temperature=1.0)
PROGRAMS = {"tools": ["python"], "calls": "python", "sandbox": "none"}
GUESS = {
    "training": {
        "seed": 5,
        "max_steps": 4,
        "batch_size": 3,
        "group_size": 4,
        "max_tokens": 6,
        "temperature": 1.0,
        "lr": 5e-3,
        "save_every": 2,
    },
    "data": {"task": "guess", "options": {"digits": 1}},
    "environment": {"environment": "guess", "max_turns": 3, "max_turn_tokens": 2},
}


def write(text: str) -> SampleTurns:
    """Return a policy that always writes the same, two tokens a turn."""

    def sample(asked: Sequence[Prompt | NextTurn], how: Sampling) -> list[Rollout | None]:
        return [turn(one) for one in asked]

    def turn(asked: Prompt | NextTurn) -> Rollout:
        if isinstance(asked, Prompt):
            return Rollout(asked, text, (1, 0), np.zeros(2), (text, ""), truncated=False)
        before, said = asked.rollout, "".join(content for _, content in asked.messages)
        given = (*before.given, Given(len(before.tokens), (7,) * len(said), said))
        tokens, pieces = (*before.tokens, 1, 0), (*before.pieces, text, "")
        return replace(
            before, text=text, tokens=tokens, logprobs=np.zeros(len(tokens)), pieces=pieces, given=given
        )

    return sample


def play(
    episode: Callable[[], object], prompts: int = 1, how: Sampling = HOW, policy: str = "x", **table: object
) -> list[Rollout]:
    episodes = Episodes(EnvironmentSection(**table), episode, write(policy))
    try:
        groups = episodes.play([Prompt(n, f"p{n}", "") for n in range(prompts)], how)
    finally:
        episodes.close()
    return [rollout for group in groups for rollout in group.rollouts]


class Count:
    """Answers every turn, and ends after three."""

    def __init__(self) -> None:
        self.turns = 0

    def start(self, prompt: Prompt) -> str:
        return prompt.text

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.turns += 1
        return f"turn {self.turns}", float(self.turns), self.turns == 3


def test_an_episode_is_one_rollout_with_what_was_said_between_its_turns() -> None:
    rollout = play(Count)[0]
    assert rollout.turns == ["x", "x", "x"]
    assert [given.text for given in rollout.given] == ["turn 1", "turn 2"]
    assert rollout.episode
    assert rollout.episode.rewards == (1.0, 2.0, 3.0)
    assert (rollout.episode.reward, rollout.truncated) == (3.0, False)
    summary = summary_of(play(Count))
    assert summary
    assert (summary.turns_mean, summary.observation_tokens) == (3.0, 24)


@pytest.mark.parametrize(
    ("table", "how", "reward"),
    [
        ({"turn_reward": "sum"}, HOW, 6.0),
        ({"turn_reward": "sum", "discount": 0.5}, HOW, 1 + 0.5 * 2 + 0.25 * 3),
        ({"max_turns": 2}, HOW, 2.0),
        ({"max_turns": 2, "truncated_reward": -1.0}, HOW, -1.0),
        ({"truncated_reward": -1.0}, replace(HOW, max_tokens=4), -1.0),
    ],
)
def test_what_an_episode_is_worth(table: dict[str, object], how: Sampling, reward: float) -> None:
    rollout = play(Count, how=how, **table)[0]
    assert rollout.episode
    assert rollout.episode.reward == reward
    assert rollout.truncated == (len(rollout.episode.rewards) < 3)


def test_an_episode_whose_last_turn_max_tokens_cut_is_truncated() -> None:
    class Ends(Count):
        def step(self, completion: str) -> tuple[str, float, bool]:
            return "", 1.0, True

    def cut(asked: Sequence[Any], how: Sampling) -> list[Rollout | None]:
        return [Rollout(one, "x", (1, 1), np.zeros(2), ("x", "x"), truncated=True) for one in asked]

    episodes = Episodes(EnvironmentSection(truncated_reward=-1.0), Ends, cut)
    (group,) = episodes.play([Prompt(0, "p", "")], Sampling(1, 2, 1.0))
    episodes.close()
    (rollout,) = group.rollouts
    assert rollout.episode
    assert (rollout.truncated, rollout.episode.reward) == (True, -1.0)


class UnreadableError(Exception):
    """Whatever is asked of it raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__

    def __bool__(self) -> bool:
        raise RuntimeError("neither")

    def __float__(self) -> float:
        raise RuntimeError("no number")


def leave_task() -> object:
    task = asyncio.current_task()
    assert task
    task.cancel()
    return "", 1.0, True


def raise_from(error: BaseException) -> object:
    raise error


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: UnreadableError(), "step returned a UnreadableError; needs"),
        (lambda: ("", 1.0, UnreadableError()), "step returned done = a UnreadableError; needs True or False"),
        (
            lambda: ("", 1.0, np.array([True, False])),
            "step returned done = array([ True, False]); needs True",
        ),
        (lambda: ("", 1.0, np.array([True])), "step returned done = array([ True]); needs True or False"),
        (lambda: ("", 1.0, "False"), "step returned done = 'False'; needs True or False"),
        (lambda: ("", 1.0, 2), "step returned done = 2; needs True or False"),
        (lambda: ("", UnreadableError(), True), "step returned the reward a UnreadableError; needs a number"),
        (lambda: ("", 10**400, True), "step returned the reward 1"),
        (lambda: ("", 1e308, True), "step returned the reward 1e+308; needs at most 1e+15"),
        (lambda: raise_from(UnreadableError()), "UnreadableError: its text cannot be made"),
        (lambda: raise_from(GeneratorExit()), "GeneratorExit"),
        (lambda: raise_from(asyncio.CancelledError()), "CancelledError"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_a_step_returns_or_raises_costs_only_its_episode(
    is_async: bool, act: Callable[[], object], said: str
) -> None:
    class Acts(Count):
        def step(self, completion: str) -> Any:
            return act()

    class Awaits(Count):
        async def step(self, completion: str) -> Any:
            return act()

    (rollout,) = play(Awaits if is_async else Acts, how=replace(HOW, group_size=1))
    assert rollout.episode
    assert said in rollout.episode.error


@pytest.mark.parametrize("done", [True, 1, 1.0, np.True_, np.int64(1)])
def test_a_step_may_say_the_end_with_any_kind_of_number(done: object) -> None:
    class Says(Count):
        def step(self, completion: str) -> Any:
            self.turns += 1
            return "more", 1.0, done if self.turns == 2 else type(done)(0)  # type: ignore[call-arg]

    (rollout,) = play(Says, how=replace(HOW, group_size=1))
    assert rollout.episode
    assert (rollout.episode.rewards, rollout.episode.error) == ((1.0, 1.0), "")


def test_a_coroutine_that_stops_its_event_loop_costs_no_other_episode() -> None:
    class Stops(Count):
        async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
            if self.turns == 1:
                asyncio.get_running_loop().stop()
                await asyncio.sleep(0)
            return super().step(completion)

    rewards = [one.episode.rewards for one in play(Stops, prompts=4) if one.episode]
    assert rewards == [(1.0, 2.0, 3.0)] * 8


def test_with_threads_an_episode_s_calls_are_made_in_one_thread() -> None:
    closed: list[int] = []

    class Table(Count):
        def __init__(self) -> None:
            super().__init__()
            self.base = sqlite3.connect(":memory:")
            self.thread = threading.get_ident()

        def step(self, completion: str) -> tuple[str, float, bool]:
            time.sleep(0.06)  # slow enough to be left alone by calls that are made in turn
            ((self.turns,),) = self.base.execute("select ?", (self.turns + 1,))
            return "more", float(self.turns), self.turns == 3

        def close(self) -> None:
            self.base.close()
            closed.append(self.thread)

    rewards = [one.episode.rewards for one in play(Table, prompts=4, threads=True) if one.episode]
    assert rewards == [(1.0, 2.0, 3.0)] * 8
    assert len(closed) == 8
    wait_until(lambda: not {one.ident for one in threading.enumerate()} & {*closed})


def test_a_step_that_cancels_its_task_costs_only_its_episode() -> None:
    class Cancels(Count):
        async def step(self, completion: str) -> Any:
            return leave_task()

    (rollout,) = play(Cancels, how=replace(HOW, group_size=1))
    assert rollout.episode
    assert "CancelledError" in rollout.episode.error


def test_episodes_wait_for_their_environments_at_once() -> None:
    arrived = 0
    everyone = asyncio.Event()

    class Meeting(Count):
        async def step(self, completion: str) -> tuple[str, float, bool]:
            nonlocal arrived
            arrived += 1
            if arrived == 200:
                everyone.set()
            await everyone.wait()
            return "", 1.0, True

    rollouts = play(Meeting, prompts=100)
    assert [rollout.prompt.id for rollout in rollouts] == [n for n in range(100) for _ in range(2)]


class Seeds:
    """A backend that notes the seed of each call, and cannot read what ends in `?`."""

    def __init__(self) -> None:
        self.seen: list[int | None] = []

    def sample(self, prompts: Sequence[Prompt], how: Sampling) -> list[Group]:
        self._note(how, any(prompt.text.endswith("?") for prompt in prompts))
        return [Group(p, (Rollout(p, "", (1,), np.zeros(1), ("",), truncated=False),)) for p in prompts]

    def extend(self, turns: Sequence[NextTurn], how: Sampling) -> list[Rollout | None]:
        self._note(how, False)
        return [turn.rollout for turn in turns]

    def _note(self, how: Sampling, is_unreadable: bool) -> None:
        self.seen.append(how.seed)
        if is_unreadable:
            raise PromptError("unreadable")


def test_no_two_calls_of_an_evaluation_share_random_numbers() -> None:
    backend = Seeds()
    sample = TurnSampler(backend, 0)
    asked = [Prompt(n, text, "") for n, text in enumerate(["a", "b?", "c", "d"])]
    (begun,) = sample([asked[0]], replace(HOW, seed=7))
    assert isinstance(begun, Rollout)
    backend.seen.clear()
    taken = sample([*asked, NextTurn(begun, (("user", "x"),), 1)], replace(HOW, seed=7))
    assert [isinstance(one, Rollout) for one in taken] == [True, False, True, True, True]
    assert len(backend.seen) == len(set(backend.seen)) == 6
    backend.seen.clear()
    sample([asked[0]], HOW)
    assert backend.seen == [None]


def test_plain_functions_wait_at_once_in_threads() -> None:
    everyone = threading.Barrier(8)

    class Meeting(Count):
        def step(self, completion: str) -> tuple[str, float, bool]:
            everyone.wait()
            return "", 1.0, True

    assert len(play(Meeting, prompts=4, threads=True)) == 8


def raising(turn: object) -> type[Count]:
    class Wrong(Count):
        def step(self, completion: str) -> object:
            if isinstance(turn, Exception):
                raise turn
            return turn

    return Wrong


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (ValueError("no board"), "ValueError: no board"),
        (ExceptionGroup("of a TaskGroup", [KeyError("board")]), "KeyError: 'board'"),
        (None, "step returned None; needs (observation, reward, done)"),
        (("", 0.0, False), "step returned ''; needs a text or a list of messages, not empty"),
        (("a", float("nan"), False), "step returned the reward nan; needs a finite number"),
        (("a", "1", False), "step returned the reward '1'; needs a number or None"),
        (([{"role": "judge", "content": "a"}], 0.0, False), "the role one of system, user, assistant, tool"),
        (
            ([{"role": "user", "text": "a"}], 0.0, False),
            '"step": has no \'content\'; needs {"role": ..., "content": ...}',
        ),
        (
            ([{"role": "user", "content": b"a"}], 0.0, False),
            "\"step\": 'content' is \"b'a'\"; needs a non-empty string",
        ),
    ],
)
def test_a_failure_costs_its_episode(turn: object, said: str) -> None:
    class Some(Count):
        opened = 0

        def __init__(self) -> None:
            super().__init__()
            Some.opened += 1
            self.step = raising(turn)().step if Some.opened == 1 else super().step  # type: ignore[method-assign]

    failed, fine = play(Some)
    assert failed.episode
    assert failed.episode.reward is None
    assert said in failed.episode.error
    assert failed.episode.error.startswith("prompt 0: ")
    assert fine.episode
    assert (fine.episode.reward, fine.episode.error) == (3.0, "")


@pytest.mark.parametrize("said", [None, "", [], 3])
def test_an_environment_that_says_nothing_at_the_start_costs_its_episode(said: object) -> None:
    class Silent(Count):
        def start(self, prompt: Prompt) -> object:
            return said

    silent, fine = (one.episode for one in play(first_of(Silent)))
    assert silent
    assert fine
    wanted = f"prompt 0: start returned {said!r}; needs a text or a list of messages, not empty"
    assert (silent.error, fine.error) == (wanted, "")


def test_without_a_template_the_texts_of_a_conversation_follow_each_other() -> None:
    class Talks(Count):
        def start(self, prompt: Prompt) -> list[dict[str, str]]:  # type: ignore[override]
            return [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]

        def step(self, completion: str) -> tuple[object, float, bool]:  # type: ignore[override]
            _, reward, is_over = super().step(completion)
            return [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], reward, is_over

    backend = registry.bound("backends", "numpy", {})(BackendSpec(seed=0, alphabet="abc"))
    episodes = Episodes(EnvironmentSection(), Talks, TurnSampler(backend, 2))
    (group,) = episodes.play([Prompt(0, "?", "")], replace(HOW, group_size=1))
    episodes.close()
    (rollout,) = group.rollouts
    assert backend.read(rollout)[:3] == (0, 1, 2)
    assert [given.tokens for given in rollout.given] == [(0, 1)] * 2


def test_a_first_message_that_no_context_holds_costs_its_episode() -> None:
    class Long(Count):
        def start(self, prompt: Prompt) -> str:
            return "a" * (CONTEXT + 1)

    backend = registry.bound("backends", "numpy", {})(BackendSpec(seed=0, alphabet="a"))
    episodes = Episodes(EnvironmentSection(), Long, TurnSampler(backend, 2))
    (group,) = episodes.play([Prompt(7, "?", "")], replace(HOW, group_size=1))
    episodes.close()
    assert group.rollouts[0].episode
    said = f"prompt 7 has {CONTEXT + 1} characters, and the policy's context is {CONTEXT}; shorten it"
    assert group.rollouts[0].episode.error == said


def test_an_environment_that_never_ends_is_ended_by_its_turns() -> None:
    class Endless(Count):
        def step(self, completion: str) -> tuple[str, float, bool]:
            return "more", 0.5, False

    for rollout in play(Endless, max_turns=4, how=replace(HOW, max_tokens=1000)):
        assert rollout.episode
        assert (len(rollout.turns), rollout.truncated, rollout.episode.reward) == (4, True, 0.5)


def test_an_environment_that_opens_nothing_costs_its_episode() -> None:
    nothing, fine = (one.episode for one in play(first_of(lambda: None)))  # type: ignore[arg-type, return-value]
    assert nothing
    assert fine
    assert nothing.error == "prompt 0: opening the episode returned None; needs an object with start and step"
    assert fine.error == ""


@pytest.mark.parametrize("is_async", [False, True])
def test_an_episode_that_opens_too_late_is_closed(is_async: bool) -> None:
    may_open, closed = threading.Event(), threading.Event()

    class Slow(Count):
        def __init__(self) -> None:
            super().__init__()
            may_open.wait()

        def close(self) -> object:
            return asyncio.to_thread(closed.set) if is_async else closed.set()

    episode = play(Slow, time_limit_s=0.01, threads=True, how=replace(HOW, group_size=1))[0].episode
    assert episode
    assert episode.error == "prompt 0: opening the episode took longer than 0.01 s"
    may_open.set()
    assert closed.wait(60)


@pytest.mark.parametrize("is_own", [False, True])
def test_an_episode_that_opens_after_the_end_of_its_run_is_closed(is_own: bool) -> None:
    may_open, taken_back = threading.Event(), threading.Event()

    async def leave() -> None:
        thread = InTurn(60.0, is_own=is_own)
        with suppress(TimeoutError):
            await asyncio.wait_for(thread.call(lambda: may_open.wait(60), lambda _: taken_back.set()), 0.01)

    asyncio.run(leave())
    may_open.set()
    assert taken_back.wait(60)


def first_of(kind: type[Count]) -> Callable[[], Count]:
    """Open one episode of a kind, then such that end well."""
    kinds = iter([kind])
    return lambda: next(kinds, Count)()


def test_a_plain_function_that_blocks_costs_its_episode() -> None:
    over = threading.Event()

    class Stuck(Count):
        def step(self, completion: str) -> tuple[str, float, bool]:
            over.wait()
            return "", 1.0, True

    rollouts = play(first_of(Stuck), prompts=2, time_limit_s=2.0)  # which the others keep on a busy machine
    over.set()
    stuck, *fine = [rollout.episode for rollout in rollouts if rollout.episode]
    assert (stuck.timed_out, stuck.reward) == (True, None)
    assert stuck.error == "prompt 0: step took longer than 2 s"
    assert [(one.error, one.reward) for one in fine] == [("", 3.0)] * 3


def test_a_coroutine_that_blocks_costs_its_episode() -> None:
    """The others in its event loop are played again, in another one."""
    over = threading.Event()

    class Awaits(Count):
        async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
            await asyncio.sleep(0.01)
            return super().step(completion)

    class Stuck(Awaits):
        async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
            over.wait()
            return "", 1.0, True

    kinds = iter([Stuck])
    rollouts = play(lambda: next(kinds, Awaits)(), prompts=2, time_limit_s=2.0)  # see above
    over.set()
    stuck, *fine = [rollout.episode for rollout in rollouts if rollout.episode]
    assert (stuck.timed_out, stuck.reward) == (True, None)
    assert stuck.error == "prompt 0: a coroutine neither returned nor awaited anything for 2 s"
    assert [(one.error, one.reward) for one in fine] == [("", 3.0)] * 3
    assert {one.retries for one in fine} <= {0, 1}


def test_plain_functions_that_wait_do_so_at_the_same_time() -> None:
    everyone = threading.Barrier(6)

    class Waits(Count):
        def step(self, completion: str) -> tuple[str, float, bool]:
            everyone.wait(30)
            return super().step(completion)

    episodes = [one.episode for one in play(Waits, prompts=3) if one.episode]
    assert [(one.error, one.reward) for one in episodes] == [("", 3.0)] * 6


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(
    "error", [SystemExit(1), KeyboardInterrupt(), StopIteration(), asyncio.CancelledError(), TimeoutError()]
)
def test_an_environment_that_exits_costs_its_episode(error: BaseException, threads: bool) -> None:
    class Exits(Count):
        def step(self, completion: str) -> object:
            raise error

    class ExitsAsync(Exits):
        async def step(self, completion: str) -> object:
            raise error

    for kind in (Exits, ExitsAsync):
        episodes = [one.episode for one in play(first_of(kind), threads=threads) if one.episode]
        failed, fine = sorted(episodes, key=lambda one: not one.error)  # with threads, any opens first
        assert (failed.reward, failed.timed_out, fine.reward) == (None, False, 3.0)
        assert "StopIteration" in failed.error or type(error).__name__ in failed.error


@pytest.mark.parametrize("name", ["start", "step", "close", "tool_calls"])
def test_an_attribute_that_cannot_be_read_costs_at_most_its_episode(name: str) -> None:
    def unreadable(self: object) -> None:
        raise KeyError(name)

    failed, fine = (
        one.episode for one in play(first_of(type("Odd", (Count,), {name: property(unreadable)})))
    )
    assert failed
    assert fine
    assert fine.reward == 3.0
    is_needed = name in {"start", "step"}
    assert failed.reward == (None if is_needed else 3.0)
    assert (f"KeyError: '{name}'" in failed.error) if is_needed else (not failed.error)


def test_episodes_of_plain_functions_are_sampled_together_and_in_order(monkeypatch: Any) -> None:
    monkeypatch.setattr(calls, "SLOW_S", 60.0)  # none is slow, however loaded the machine is
    batches: list[list[int]] = []
    policy = write("x")

    def sample(asked: Sequence[Prompt | NextTurn], how: Sampling) -> Sequence[Rollout | None]:
        prompts = [one if isinstance(one, Prompt) else one.rollout.prompt for one in asked]
        batches.append([prompt.id for prompt in prompts])
        return policy(asked, how)

    class Uneven(Count):
        def step(self, completion: str) -> tuple[str, float, bool]:
            time.sleep(0.001 * (self.turns % 2))
            return super().step(completion)

    episodes = Episodes(EnvironmentSection(), Uneven, sample)
    episodes.play([Prompt(n, "p", "") for n in range(20)], replace(HOW, group_size=1))
    episodes.close()
    assert batches == [[*range(20)]] * 3


def test_each_turn_may_be_a_sample_of_its_own() -> None:
    backend = registry.bound("backends", "numpy", {})(BackendSpec(seed=0, alphabet="abc?<"))

    class Game(Count):
        def step(self, completion: str) -> tuple[str, float, bool]:
            super().step(completion)
            return "<", float(self.turns), False

    table = EnvironmentSection(max_turns=3, max_turn_tokens=2, separate_turns=True)
    episodes = Episodes(table, Game, TurnSampler(backend, 2))
    (group,) = episodes.play([Prompt(7, "?", "a")], replace(HOW, group_size=1, max_tokens=5))
    episodes.close()
    (rollout,) = group.rollouts
    first, second, third = rollout.samples[1], rollout.samples[2], rollout
    assert [one.prompt.text for one in (first, second)] == ["?", f"?{first.text}<"]
    assert third.prompt.text == f"?{first.text}<{second.text}<"
    assert {(one.prompt.id, one.prompt.answer, one.given) for one in rollout.samples} == {(7, "a", ())}
    assert sum(len(one.tokens) for one in rollout.samples) <= 5
    assert rollout.episode
    assert rollout.episode.rewards == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("told", "truncated", "error"),
    [
        ("<" * (CONTEXT // 2), True, ""),
        ("<" * (CONTEXT + 1), False, f"has {CONTEXT + 1} characters, and the policy's context is {CONTEXT}"),
    ],
)
def test_a_conversation_rendered_anew_that_outgrows_the_context_is_truncated(
    told: str, truncated: bool, error: str
) -> None:
    backend = registry.bound("backends", "numpy", {})(BackendSpec(seed=0, alphabet="abc?<"))

    class Talks(Count):
        def step(self, completion: str) -> tuple[str, float, bool]:
            return told, 0.5, False

    table = EnvironmentSection(max_turns=9, max_turn_tokens=2, separate_turns=True, truncated_reward=-1.0)
    episodes = Episodes(table, Talks, TurnSampler(backend, 2))
    (group,) = episodes.play([Prompt(7, "?", "a")], replace(HOW, group_size=1, max_tokens=50))
    episodes.close()
    (rollout,) = group.rollouts
    assert rollout.truncated == truncated
    assert rollout.episode
    assert rollout.episode.reward == (-1.0 if truncated else None)
    assert (error in rollout.episode.error) if error else (not rollout.episode.error)
    assert len(rollout.samples) == len(rollout.episode.rewards) == (2 if truncated else 1)


def test_a_prompt_that_is_too_long_without_an_environment_is_one_of_the_data() -> None:
    backend = registry.bound("backends", "numpy", {})(BackendSpec(seed=0, alphabet="a"))
    with ExitStack() as opened, pytest.raises(ConfigError, match=r"^\[data\]: prompt 3 has 16385 characters"):
        sampler_of(Config(), backend, opened)([Prompt(3, "a" * (CONTEXT + 1), "")], HOW)


def test_an_environment_that_never_answers_is_ended() -> None:
    class Silent(Count):
        async def step(self, completion: str) -> object:
            await asyncio.Event().wait()

    episode = play(Silent, time_limit_s=0.5, error_reward=-1.0)[0].episode
    assert episode
    assert (episode.timed_out, episode.reward) == (True, -1.0)
    assert episode.error == "prompt 0: step took longer than 0.5 s"


def test_a_stop_reaches_episodes_that_wait() -> None:
    class Waits(Count):
        async def step(self, completion: str) -> object:  # type: ignore[override]
            await asyncio.Event().wait()
            return "", 1.0, True

    episodes = Episodes(EnvironmentSection(time_limit_s=300.0), Waits, write("x"), is_leaving=lambda: True)
    try:
        with pytest.raises(InterruptedRunError):
            episodes.play([Prompt(0, "p", "")], HOW)
    finally:
        episodes.close()


def test_the_template_of_episodes_finishes_two_steps(here: Path, retrain: Callable[..., Any]) -> None:
    assert retrain("init", "--template", "agent").returncode == 0
    done = retrain("run", "agent.toml", "--set", "campaign.max_steps=2", "--set", "campaign.launcher=inline")
    assert done.returncode == 0, done.stdout + done.stderr
    runs = sorted(here.glob("logs/*/runs/*"))
    assert [len(read_metrics(run)) for run in runs] == [2, 2]


def test_an_error_of_the_sampler_ends_every_episode() -> None:
    def broken(asked: Sequence[Prompt | NextTurn], how: Sampling) -> list[Rollout | None]:
        raise MemoryError("too many")

    episodes = Episodes(EnvironmentSection(), Count, broken)
    with pytest.raises(MemoryError, match="too many"):
        episodes.play([Prompt(0, "p", "")], HOW)
    episodes.close()


def test_the_game_answers_each_digit() -> None:
    game = Game()
    assert game.start(Prompt(0, "?", "471")) == "?"
    assert game.step("555") == ("<><", 0.1, False)
    assert game.step("471") == ("===", 1.0, True)
    assert game.step("47") == ("", 0.0, True)


def test_a_resumed_run_of_episodes_is_the_undisturbed_one(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole", GUESS)
    assert worker.run(whole.directory, threading.Event()) == 0
    rows = read_metrics(whole.directory)
    assert all(row["turns_mean"] >= 1 and row["episode_errors"] == 0 for row in rows)
    assert sum(row["observation_tokens"] for row in rows) > 0
    stopped = make_run(tmp_path / "stopped", GUESS)
    worker.run(stopped.directory, StopAfterStep(stopped, 2))
    assert worker.run(stopped.directory, threading.Event()) == 0
    assert without_times(read_metrics(stopped.directory)) == without_times(rows)
    assert all(row["turns"] for row in read_samples(whole.samples))


def test_a_stop_within_episodes_changes_nothing_of_the_run(own: str, tmp_path: Path) -> None:
    """A play that it interrupts is repeated; that of an evaluation completes the newest row."""
    tables = with_environment(f"{own}.Twice", max_turn_tokens=2)
    tables["data"] = {"task": "successor", "eval_prompts": 2}
    tables["training"] = {**GUESS["training"], "max_steps": 2, "eval_every": 1, "save_every": 100}
    whole = make_run(tmp_path / "whole", tables)
    assert worker.run(whole.directory, threading.Event()) == 0
    rows, lacking = read_metrics(whole.directory), 0
    for look in range(3, 1000, 3):
        stopped = make_run(tmp_path / f"stopped{look}", tables)
        if worker.run(stopped.directory, StopAtLook(look)) == 0:
            break
        so_far = read_metrics(stopped.directory)
        lacking += [set(row) < set(full) for row, full in zip(so_far, rows, strict=False)].count(True)
        assert worker.run(stopped.directory, threading.Event()) == 0
        assert without_times(read_metrics(stopped.directory)) == without_times(rows)
    assert look > 6
    assert lacking > 1


OWN = '''
import asyncio
import gc
import io
import os
import signal
import sys
import threading
import time
from collections import Counter

import numpy

number_of = Counter()


def solve(prompt, base_url, api_key, board=None, *, size):
    """A program."""


class Twice:
    """Tells the answer after the first turn."""

    def start(self, prompt):
        self.answer, self.told = prompt.answer, False
        return prompt.text

    def step(self, completion):
        is_over, self.told = self.told, True
        return self.answer, float(completion == self.answer), is_over


class Once:
    """Leaves the score to the reward."""

    def __init__(self, *, noise: str = "?") -> None:
        self.noise = noise

    def start(self, prompt):
        return self.noise

    async def step(self, completion):
        return "", None, True


class Opened(Once):
    def __init__(self, *, path: str) -> None:
        super().__init__()
        self.file = open(path, "w")

    async def close(self):
        self.file.write("closed")
        self.file.close()
        raise OSError("a late complaint")


class Closed(Once):
    def __init__(self):
        super().__init__()
        number_of["opened"] += 1

    async def close(self):
        number_of["closed"] += 1
        raise OSError("closed twice")


class Strange(Once):
    """Every third says what the policy has no characters for."""

    def step(self, completion):
        number_of["strange"] += 1
        return ("\u00e9", 0.0, False) if number_of["strange"] % 3 == 0 else ("", 1.0, True)


class Shut:
    def __init__(self, *, level2: str = ""):
        from retrain.base.errors import ConfigError

        raise ConfigError(f"level2: got {level2!r}; needs a level" if level2 else "closed on Mondays")


class Mute:
    def start(self, prompt):
        return "?"


class Forgetful(Opened):
    def __init__(self, *, path: str = os.devnull) -> None:
        super().__init__(path=path)

    def step(self):
        return "", 0.0, True


class Unreachable(Once):
    def __init__(self):
        threading.Event().wait()


class Clinging(Once):
    async def close(self):
        await asyncio.Event().wait()


class Hosted(Once):
    """Ends or blocks its process if the policy says so; else answers with the number of the process."""

    def start(self, prompt):
        self.text = prompt.text
        return [{"role": "user", "content": prompt.text}]

    def step(self, completion):
        if self.text == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.text == "blocks":
            time.sleep(60)
        if self.text == "raises":
            sys.exit("enough")
        print("prints")
        return str(os.getpid()), numpy.float32(0.5), False


class Delayed(Once):
    """The first episode starts a thread that ends the process during the next call, of whichever episode."""

    called = threading.Event()

    def start(self, prompt):
        self.number, self.turns = prompt.id, 0
        return "?"

    def step(self, completion):
        Delayed.called.set()
        if self.number == 0 and self.turns == 0:
            Delayed.called.clear()
            end = lambda: (Delayed.called.wait(), os._exit(3))
            threading.Thread(target=end, name="end", daemon=True).start()
        elif any(one.name == "end" for one in threading.enumerate()):
            time.sleep(60)
        self.turns += 1
        return "<", 1.0, self.turns == 2


class Forging(Once):
    """Answers its own call first, as a copy of the process would do."""

    def step(self, completion):
        pipes = [one for one in gc.get_objects() if isinstance(one, io.FileIO) and one.fileno() > 2]
        (replies,) = [one for one in pipes if one.writable()]
        replies.write(b'{"call": 1}\\n')
        return "", 1.0, True


class Forking(Once):
    """Leaves a copy of its process in the first step of an episode."""

    def start(self, prompt):
        self.number, self.turns = prompt.id, 0
        return "?"

    def step(self, completion):
        self.turns += 1
        if self.number == 2 and self.turns == 1:
            os.fork()
        return "<", float(self.number), self.turns == 3


class Broken(Once):
    def step(self, completion):
        raise OSError("the board is gone")
'''


@pytest.fixture
def own(here: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with environments of one's own, which Python finds."""
    monkeypatch.syspath_prepend(str(here))
    name = f"own_episodes_{abs(hash(str(here))):x}"
    (here / f"{name}.py").write_text(OWN)
    return name


def test_processes_play_episodes_and_what_one_does_costs_only_itself(own: str) -> None:
    table = EnvironmentSection(f"{own}.Hosted", processes=2, time_limit_s=2.0, max_turns=3)
    texts = ["fine", "dies", "fine", "blocks", "fine", "raises"]
    episodes = Episodes(table, lambda: None, write("x"))
    prompts = [Prompt(number, text, "", row={"n": 1}) for number, text in enumerate(texts)]
    groups = episodes.play(prompts, replace(HOW, group_size=1))
    episodes.close()
    rollouts = [group.rollouts[0] for group in groups]
    said = {one.prompt.text: one.episode for one in rollouts if one.episode and one.prompt.text != "fine"}
    assert said["dies"].error == "prompt 1: its process ended by SIGKILL during step"
    assert (said["blocks"].error, said["blocks"].timed_out) == ("prompt 3: step took longer than 2 s", True)
    assert "SystemExit: enough" in said["raises"].error
    fine = [one for one in rollouts if one.prompt.text == "fine"]
    assert [(one.episode.error, one.episode.rewards) for one in fine if one.episode] == [("", (0.5,) * 3)] * 3
    assert all(len({given.text for given in one.given}) == 1 for one in fine)  # each in one process
    summary = summary_of(rollouts)
    assert summary
    assert summary.episode_errors == 3
    assert summary.episode_retries >= 1


def test_processes_that_end_cost_no_sound_episode_however_many_do(own: str) -> None:
    episodes = Episodes(
        EnvironmentSection(f"{own}.Hosted", processes=1, max_turns=2), lambda: None, write("x")
    )
    prompts = [Prompt(number, "dies", "") for number in range(5)] + [Prompt(5, "fine", "")]
    *dead, fine = episodes.play(prompts, replace(HOW, group_size=1))
    episodes.close()
    assert [group.rollouts[0].episode.error for group in dead if group.rollouts[0].episode] == [
        f"prompt {number}: its process ended by SIGKILL during step" for number in range(5)
    ]
    episode = fine.rollouts[0].episode
    assert episode
    assert (episode.error, episode.rewards, episode.retries) == ("", (0.5, 0.5), 1)


def test_an_episode_whose_thread_ends_its_process_later_costs_no_other(own: str) -> None:
    episodes = Episodes(
        EnvironmentSection(f"{own}.Delayed", processes=1, max_turns=2), lambda: None, write("x")
    )
    first, second = episodes.play([Prompt(0, "p", ""), Prompt(1, "p", "")], replace(HOW, group_size=1))
    episodes.close()
    said = [group.rollouts[0].episode.error for group in (first, second) if group.rollouts[0].episode]
    assert said == ["prompt 0: its process ended with exit code 3 during step", ""]


def test_a_fork_in_a_process_leaves_rewards_to_their_episodes(own: str) -> None:
    episodes = Episodes(
        EnvironmentSection(f"{own}.Forking", processes=1, time_limit_s=5.0), lambda: None, write("x")
    )
    groups = episodes.play([Prompt(n, "p", "") for n in range(12)], replace(HOW, group_size=1))
    episodes.close()
    played = [group.rollouts[0].episode for group in groups]
    assert [(one.error, one.rewards) for one in played if one] == [("", (float(n),) * 3) for n in range(12)]


def test_an_answer_to_another_call_ends_its_process(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = Episodes(
        EnvironmentSection(f"{own}.Forging", processes=1, time_limit_s=5.0), lambda: None, write("x")
    )
    (group,) = episodes.play([Prompt(0, "p", "")], replace(HOW, group_size=1))
    episodes.close()
    episode = group.rollouts[0].episode
    assert episode
    assert episode.error == "prompt 0: its process answered another call during step"


@pytest.mark.parametrize("way", ["plain", "threads", "async"])
def test_a_fork_leaves_no_copy_of_the_worker(way: str) -> None:
    copies = []

    class Forks(Count):
        def step(self, completion: str) -> tuple[str, float, bool]:
            if copy := os.fork():
                copies.append(copy)
            return "", 1.0, True

    class Awaited(Forks):
        async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
            return super().step(completion)

    (rollout,) = play(
        Awaited if way == "async" else Forks, how=replace(HOW, group_size=1), threads=way == "threads"
    )
    assert rollout.episode
    assert rollout.episode.reward == 1.0
    (copy,) = copies
    try:
        wait_until(lambda: os.waitpid(copy, os.WNOHANG) != (0, 0))
    except AssertionError:
        os.kill(copy, signal.SIGKILL)
        raise


def test_a_process_retires_after_its_episodes(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.plugins.environments.hosts.RETIRES_AFTER", 2)
    table = EnvironmentSection(f"{own}.Hosted", processes=1, max_turns=2)
    episodes = Episodes(table, lambda: None, write("x"))
    one = replace(HOW, group_size=1)
    played = [episodes.play([Prompt(0, "fine", "")], one)[0].rollouts[0] for _ in range(3)]
    episodes.close()
    first, second, third = [rollout.given[0].text for rollout in played]
    assert first == second != third
    for number in {first, third}:
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)


def solving(**config: int) -> dict[str, object]:
    return {"options": {"run": "OWN.solve", "config": config}}


def with_environment(name: str, **table: object) -> dict[str, object]:
    return {**GUESS, "environment": {"environment": name, **table}}


def test_a_reward_of_none_leaves_scoring_to_the_reward(own: str, tmp_path: Path) -> None:
    files = make_run(tmp_path / "r", with_environment(f"{own}.Once"))
    assert worker.run(files.directory, threading.Event()) == 0
    rows = read_metrics(files.directory)
    assert {row["turns_mean"] for row in rows} == {1.0}
    assert all(row["mean_reward"] == row["correct_rate"] for row in rows)  # `match` gives 0 or 1


def test_every_environment_of_a_run_is_closed(own: str, tmp_path: Path) -> None:
    files = make_run(tmp_path / "r", with_environment(f"{own}.Closed"))
    assert worker.run(files.directory, threading.Event()) == 0
    number_of = importlib.import_module(own).number_of
    assert number_of["closed"] == number_of["opened"] == 4 * 12


def test_a_run_whose_episodes_all_fail_ends_with_the_reason(
    own: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = make_run(tmp_path / "r", with_environment(f"{own}.Broken"))
    assert worker.run(files.directory, threading.Event()) != 0
    said = capfd.readouterr().err + files.attempts.read_text()
    assert "none of 12 episodes could be played" in said
    assert "OSError: the board is gone" in said


def test_a_message_with_unknown_characters_costs_its_episode(own: str, tmp_path: Path) -> None:
    files = make_run(tmp_path / "r", with_environment(f"{own}.Strange", max_turn_tokens=2))
    assert worker.run(files.directory, threading.Event()) == 0
    assert [row["episode_errors"] for row in read_metrics(files.directory)] == [4] * 4
    (said,) = {row["error"].partition(": ")[2] for row in read_samples(files.samples) if row.get("error")}
    assert (
        said
        == "observation 'é' holds 'é', which is not in the task's alphabet; add it to the Task's `alphabet`"
    )


@pytest.mark.parametrize(
    ("name", "table", "said"),
    [
        ("guess", {"max_turns": 0}, "[environment].max_turns: got 0"),
        ("gess", {}, "did you mean 'guess'?"),
        ("Once", {"options": {"nois": "!"}}, "did you mean 'noise'?"),
        ("guess", {"discount": 0.5}, "[environment].discount: has no effect; set turn_reward"),
        ("Shut", {}, "c.toml [environment].environment: closed on Mondays"),
        ("Shut", {"options": {"level2": "x"}}, "c.toml [environment.options].level2: got 'x'; needs"),
        ("Mute", {}, "[environment].environment: 'OWN.Mute' returned a Mute without step; see"),
        ("Forgetful", {}, "step is (), and is called with (completion)"),
        (
            "Unreachable",
            {"time_limit_s": 0.1},
            "opening an episode of 'OWN.Unreachable' took longer than 0.1 s",
        ),
        ("tools", {}, "[environment].environment: backend 'numpy' cannot show functions to its policy; set"),
        ("tools", {"time_limit_s": 10.0}, "[environment.options].call_limit_s: got 10; needs less than"),
        ("tools", {"options": PROGRAMS}, "options].sandbox: 'none' is not a known sandbox"),
        ("tools", {"options": {"sandbox_options": 3}}, "sandbox_options: got 3; needs a table"),
        ("tools", {"options": {"sandbox_options": {"a": 1}}}, "options.sandbox_options].a: unknown"),
        ("harness", {"options": {"run": "OWN.gone"}}, "options].run: 'OWN.gone' cannot be loaded as a"),
        ("harness", {"processes": 1, **solving(size=2)}, "[environment].processes: got 1; 'harness' plays"),
        ("harness", solving(size=2, bord=1), "options].config: 'OWN.solve' has no key 'bord'; did you mean"),
        ("harness", solving(), "config: 'OWN.solve' needs size, which the table does not give"),
    ],
)
def test_a_wrong_table_is_an_error_before_the_run(
    own: str, name: str, table: dict[str, object], said: str
) -> None:
    path = f"{own}.{name}" if name[0].isupper() else name
    given = json.loads(json.dumps(table).replace("OWN", own))
    with pytest.raises(ConfigError) as caught:
        preflight(plan_runs(parse(with_environment(path, **given), "c.toml")), "c.toml")
    assert said in str(caught.value).replace(own, "OWN")


def test_what_an_installed_package_lacks_is_named_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "textarena").mkdir()
    (tmp_path / "textarena" / "__init__.py").write_text("import words_of_games\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "textarena", raising=False)
    tables = with_environment("textarena", options={"game": "Mastermind-v0"})
    with pytest.raises(ConfigError) as caught:
        preflight(plan_runs(parse(tables, "c.toml")), "c.toml")
    lacking = "'textarena' needs the extra 'textarena' (words_of_games not found): "
    assert str(caught.value).startswith(f"c.toml [environment].environment: {lacking}")


def test_what_the_checks_before_a_run_open_is_closed(own: str, tmp_path: Path) -> None:
    tables = with_environment(f"{own}.Opened", options={"path": str(tmp_path / "file")})
    preflight(plan_runs(parse(tables, "c.toml")), "c.toml")
    assert (tmp_path / "file").read_text() == "closed"


def test_an_episode_that_does_not_close_holds_up_no_check(own: str) -> None:
    tables = with_environment(f"{own}.Clinging", time_limit_s=0.5)
    preflight(plan_runs(parse(tables, "c.toml")), "c.toml")


def test_limits_without_an_environment_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"\[environment\].max_turns: has no effect; set environment"):
        parse({**GUESS, "environment": {"max_turns": 3}}, "c.toml")
    decided = {"environment": "single_turn", "max_turns": 3, "turn_reward": "final", "discount": 0.5}
    parse({**GUESS, "environment": decided}, "c.toml")


def campaign_of(environment: dict[str, object], *conditions: dict[str, object]) -> dict[str, object]:
    named = [{"name": f"c{number}", "environment": table} for number, table in enumerate(conditions)]
    return {**GUESS, "environment": environment, "campaign": {"seeds": [0], "conditions": named}}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (campaign_of({"max_turns": 3}, {}), ["[environment].max_turns"]),
        (campaign_of({}, {"environment": "guess"}, {"max_turns": 3}), ["#2 [environment].max_turns"]),
        (campaign_of({"max_turns": 3}, {"environment": "guess"}, {}), []),
        (campaign_of({"environment": "guess"}, {"max_turns": 3}), []),
    ],
)
def test_limits_need_an_environment_of_the_file_or_a_condition(
    tables: dict[str, object], said: list[str]
) -> None:
    try:
        parse(tables, "c.toml")
        problems = []
    except ConfigError as error:
        problems = error.problems
    assert [problem.partition(": has no effect")[0] for problem in problems] == [
        f"c.toml {'[[campaign.conditions]] ' * where.startswith('#')}{where}" for where in said
    ]


def test_every_environment_is_tried_out(own: str, tmp_path: Path) -> None:
    for name in ("guess", "single_turn", f"{own}.Once"):
        assert not [finding for finding in check_plugin("environments", name, {}) if finding.problem]
    wrong = [finding.problem for finding in check_plugin("environments", f"{own}.Broken", {})]
    assert any("OSError: the board is gone" in problem for problem in wrong)
    *_, found = check_plugin("environments", f"{own}.Forgetful", {"path": str(tmp_path / "file")})
    assert found.check == "an episode can be opened within 60 s"  # no other follows one that failed
    assert found.problem.startswith(f"'{own}.Forgetful': step is (), and is called with (completion)")
    assert (tmp_path / "file").read_text() == "closed"


def test_a_check_of_an_environment_that_loops_says_what_it_waits_for(here: Path) -> None:
    game = "import time\nclass Game:\n    def __init__(self):\n        while True: time.sleep(0.01)\n"
    (here / "loops.py").write_text(game)
    command = [sys.executable, "-m", "retrain", "plugins", "environments", "--check", "loops.Game"]
    paths = {"PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    with subprocess.Popen(
        command, env=os.environ | paths, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as checking:
        assert checking.stderr
        lines = [checking.stderr.readline() for _ in range(2)]
        checking.kill()
    for line in lines:
        assert re.fullmatch(
            r"still checking whether an episode can be opened within 60 s: \d+ s so far\n", line
        )


def test_samples_show_the_conversation(
    tmp_path: Path, retrain: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    files = make_run(tmp_path / "r", GUESS)
    row = {"prompt_id": 1, "rollout": 0, "reward": 1.0, "advantage": 0.5, "tie": False, "tokens": 4}
    turns = [
        {"policy": "5", "reward": 0.1, "environment": "<"},
        {"policy": "3", "reward": 1.0, "environment": ""},
    ]
    texts = {
        "truncated": False,
        "prompt": "?",
        "answer": "3",
        "completion": "3",
        "turns": turns,
        "tool_calls": 2,
    }
    files.samples.write_text(json.dumps({"step": 1, "attempt": 1, **row, **texts}) + "\n")
    shown = retrain("samples", files.directory).stdout  # type: ignore[attr-defined]
    assert "  2 turns  2 tool calls  4 tokens\n" in shown
    assert "  turn 1   5   (reward 0.1)\n  observed <\n  turn 2   3   (reward 1)\n" in shown


def test_turns_cut_at_their_own_limit_are_counted_and_marked(
    tmp_path: Path, retrain: Callable[..., object]
) -> None:
    files = make_run(tmp_path / "r", {**GUESS, "logging": {"samples_per_step": 4}})
    assert worker.run(files.directory, threading.Event()) == 0
    rows = read_metrics(files.directory)
    turns = [turn for sample in read_samples(files.samples) for turn in sample.get("turns", ())]
    assert all(row["max_token_hit_rate"] <= 1.0 for row in rows)
    assert sum(row["cut_turns"] for row in rows) > 0
    assert {len(turn["policy"]) for turn in turns if turn["cut"]} == {2}  # two tokens, and no end
    assert any(not turn["cut"] for turn in turns)
    shown = retrain("samples", files.directory).stdout  # type: ignore[attr-defined]
    assert "cut at max_turn_tokens)" in shown
