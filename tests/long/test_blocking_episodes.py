"""Coroutines that block their event loop for a while: what that costs the other episodes in it is time."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.backends import Sampling
from retrain.backends.progress import EpisodeProgress
from retrain.base.rollouts import Episode, NextTurn, Prompt, Rollout
from retrain.config.schema import EnvironmentSection
from retrain.plugins.environments.tools import ToolUse, prepare
from retrain.trainer.episodes import Episodes
from tests.plugins import test_harness
from tests.plugins.test_environments import HOW, Count, play, write

LIMIT_S = 4.0  # of an episode's call; what a sound one leaves of it is for a busy machine
SOUND_S = 1.0  # at most, of a sound episode's call that has the loop for itself
CALL_LIMIT_S = 2.0  # of a tool's call
EPISODES = 16
ONE = replace(HOW, group_size=1)


def is_sound(number: int) -> bool:
    return number % 8 != 0


async def spend(chance: random.Random, *, sound: bool) -> None:
    """Wait and block in turn at random, for less than the limit in all, or for much longer."""
    parts = chance.choice((3, 10, 40, 120))
    longest_s = (SOUND_S if sound else 2 * LIMIT_S) / parts
    for _ in range(parts):
        took_s = chance.uniform(0.0 if sound else 0.7, 1.0) * longest_s
        if chance.random() < 0.4:
            time.sleep(took_s)
        else:
            await asyncio.sleep(took_s)


def check_errors(episodes: Sequence[Episode | None]) -> None:
    """Check the sound episodes; one that blocks until its end may have ended before anybody noticed."""
    found = {number: one.error for number, one in enumerate(episodes) if one and is_sound(number)}
    assert found == {number: "" for number in range(EPISODES) if is_sound(number)}


@settings(max_examples=2)
@given(seed=st.integers(0, 1 << 30))
def test_no_sound_episode_fails_because_others_block(seed: int) -> None:
    class Busy(Count):
        def start(self, prompt: Prompt) -> str:
            self.number, self.chance = prompt.id, random.Random(f"{seed} {prompt.id}")
            return "?"

        async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
            await spend(self.chance, sound=is_sound(self.number))
            return super().step(completion)

    check_errors([one.episode for one in play(Busy, EPISODES, ONE, time_limit_s=LIMIT_S)])


@settings(max_examples=1)
@given(seed=st.integers(0, 1 << 30))
def test_no_sound_program_fails_because_others_block(seed: int) -> None:
    async def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        chance = random.Random(f"{seed} {prompt.id}")
        for _ in range(2):
            await asyncio.to_thread(test_harness.converse(1, []), prompt, base_url, api_key)
            await spend(chance, sound=is_sound(prompt.id))
        return 0.5

    rollouts = test_harness.play(run, prompts=EPISODES, fails=True, time_limit_s=LIMIT_S)
    check_errors([one.episode for one in rollouts])


async def work(number: int) -> str:
    """Work.

    Args:
        number: of the episode.
    """
    for _ in range(10):
        await asyncio.sleep(0.02)
    if number == 0:
        time.sleep(1.5 * CALL_LIMIT_S)
    for _ in range(10):
        await asyncio.sleep(0.02)
    return "worked"


def test_no_call_of_a_tool_fails_because_others_block() -> None:
    tools = {"tools": [f"{__name__}.work"], "calls": "python", "call_limit_s": CALL_LIMIT_S}

    def sample(asked: Sequence[Prompt | NextTurn], how: Sampling) -> list[Rollout | None]:
        texts = [f"work({one.id})" if isinstance(one, Prompt) else "done" for one in asked]
        return [write(text)([one], how)[0] for text, one in zip(texts, asked, strict=True)]

    with closing(prepare(tools, None)) as box:
        episodes = Episodes(EnvironmentSection(), lambda: ToolUse(box), sample)
        groups = episodes.play([Prompt(number, "?", "") for number in range(3)], ONE)
        episodes.close()
    errors = [one.episode.tool_errors for group in groups for one in group.rollouts if one.episode]
    assert errors == [1, 0, 0]


class Keeps(Count):
    """Reads what a task fills that began in the first call; the first episode then blocks."""

    over: threading.Event

    async def start(self, prompt: Prompt) -> str:  # type: ignore[override]
        self.number, self.queue = prompt.id, asyncio.Queue[int]()
        self.filling = asyncio.ensure_future(self.fill())
        return "?"

    async def fill(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.queue.put_nowait(1)

    async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
        await self.queue.get()
        while not self.queue.empty():
            self.queue.get_nowait()
        if self.number == 0:
            await asyncio.sleep(0.5)  # the other waits for its turn
            self.over.wait()
        return super().step(completion)

    async def close(self) -> None:
        self.filling.cancel()


def test_an_episode_that_waits_for_its_turn_is_lost_with_its_event_loop() -> None:
    """What it keeps from one call to the next may belong to that loop."""
    is_left, Keeps.over = threading.Event(), threading.Event()

    def see(progress: EpisodeProgress) -> None:
        if progress.finished:  # the one that blocks
            is_left.set()

    def sample(asked: Sequence[Prompt | NextTurn], how: Sampling) -> list[Rollout | None]:
        if isinstance(asked[0], NextTurn):
            is_left.wait(60)
        return list(write("x")(asked, how))

    episodes = Episodes(EnvironmentSection(time_limit_s=1.0), Keeps, sample, observe=see)
    groups = episodes.play([Prompt(number, "?", "") for number in range(2)], ONE)
    Keeps.over.set()
    episodes.close()
    stuck, fine = (group.rollouts[0].episode for group in groups)
    assert stuck
    assert stuck.timed_out
    assert fine
    assert (fine.error, fine.reward, fine.retries) == ("", 3.0, 1)
