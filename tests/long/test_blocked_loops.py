"""Coroutines that block their event loop until it is left behind, or refuse to end: they alone pay for it."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from retrain.base.rollouts import Prompt
from tests.plugins import test_harness as programs
from tests.plugins.test_environments import HOW, Count, play


def test_coroutines_that_fill_the_loop_together_do_not_block_it() -> None:
    class Crowd(Count):
        async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
            time.sleep(0.05)  # 40 of them in one iteration of the loop
            return "", 1.0, True

    episodes = play(Crowd, how=replace(HOW, group_size=40), time_limit_s=1.0)  # to open, on a busy machine
    assert {one.episode.error for one in episodes if one.episode} == {""}


def test_coroutines_that_block_cost_their_episodes_however_many_there_are() -> None:
    over = threading.Event()

    class Stuck(Count):
        def start(self, prompt: Prompt) -> str:
            self.blocks = prompt.id == 0
            return super().start(prompt)

        async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
            if self.blocks:
                over.wait()
            return super().step(completion)

    rollouts = play(Stuck, prompts=2, how=replace(HOW, group_size=6), time_limit_s=1.0)
    over.set()
    played = [rollout.episode for rollout in rollouts if rollout.episode]
    assert [one.timed_out for one in played] == [True] * 6 + [False] * 6
    assert [(one.error, one.reward) for one in played[6:]] == [("", 3.0)] * 6


def test_a_coroutine_that_blocks_until_others_are_late_costs_none_of_them() -> None:
    class Awaits(Count):
        def start(self, prompt: Prompt) -> str:
            self.blocks = prompt.id == 0
            return super().start(prompt)

        async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
            if self.blocks:
                time.sleep(1.5)  # longer than the limit, and not for long enough to be left behind
            for _ in range(5):
                await asyncio.sleep(0.01)
            return super().step(completion)

    rollouts = play(Awaits, prompts=3, how=replace(HOW, group_size=1), time_limit_s=1.0)
    blocking, *sound = [rollout.episode for rollout in rollouts if rollout.episode]
    assert (blocking.error, blocking.timed_out) == ("prompt 0: step took longer than 1 s", True)
    assert [(one.error, one.reward) for one in sound] == [("", 3.0)] * 2


def test_a_coroutine_that_refuses_to_be_cancelled_costs_its_episode() -> None:
    class Stays(Count):
        def start(self, prompt: Prompt) -> str:
            self.stays = prompt.id == 0
            return super().start(prompt)

        async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
            until_s = time.monotonic() + 5.0 * self.stays
            while time.monotonic() < until_s:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
            return "", 1.0, True

    rollouts = play(Stays, prompts=2, how=replace(HOW, group_size=1), time_limit_s=2.0)
    stays, fine = (one.episode for one in rollouts)
    assert stays
    assert fine
    assert (stays.error, fine.error) == ("prompt 0: step took longer than 2 s", "")


def test_programs_that_block_cost_their_episodes_and_no_other() -> None:
    over = threading.Event()

    async def block() -> None:
        over.wait()

    async def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        if prompt.id in (0, 2, 3, 5):
            await block()
        if prompt.id == 1:
            await asyncio.create_task(block())
        return await asyncio.to_thread(programs.converse(1, []), prompt, base_url, api_key)

    rollouts = programs.play(run, prompts=8, fails=True, time_limit_s=4.0)
    over.set()
    played = [one.episode for one in rollouts if one.episode]
    stuck, fine = [played[n] for n in (0, 1, 2, 3, 5)], [played[n] for n in (4, 6, 7)]
    assert [(one.error, one.reward) for one in fine] == [("", 0.5)] * 3
    assert all(one.timed_out for one in stuck)
    assert "neither returned nor awaited anything for 4 s" in stuck[1].error


def test_a_program_that_a_blocked_loop_never_began_is_closed() -> None:
    blocked, over = threading.Event(), threading.Event()
    begun: list[Any] = []

    async def episode(prompt: Prompt) -> float:
        if prompt.id == 0:
            blocked.set()
            over.wait()
        return 0.5

    def run(prompt: Prompt, base_url: str, api_key: str) -> Any:
        if prompt.id:
            blocked.wait()
        begun.append(episode(prompt))
        return begun[-1]

    *_, fine = [one.episode for one in programs.play(run, prompts=2, fails=True, time_limit_s=4.0)]
    states = {inspect.getcoroutinestate(one) for one in begun}
    over.set()
    assert (fine and fine.reward, len(begun), states) == (0.5, 3, {"CORO_RUNNING", "CORO_CLOSED"})


def test_a_program_that_blocks_until_others_are_late_costs_none_of_them() -> None:
    async def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        await asyncio.sleep(0.2)  # all have begun
        if prompt.id == 0:
            time.sleep(3.0)  # longer than the limit, and not for long enough to be left behind
        for _ in range(50):
            await asyncio.sleep(0.01)
        return 0.5

    blocking, *sound = [one.episode for one in programs.play(run, prompts=3, fails=True, time_limit_s=2.0)]
    assert blocking
    assert blocking.timed_out
    assert [(one.error, one.reward) for one in sound if one] == [("", 0.5)] * 2
