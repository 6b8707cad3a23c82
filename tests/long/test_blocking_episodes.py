"""A coroutine that blocks its event loop for a while: what that costs the other episodes in it is time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from retrain.backends import Sampling
from retrain.backends.progress import EpisodeProgress
from retrain.base.rollouts import Episode, NextTurn, Prompt, Rollout
from retrain.config.schema import EnvironmentSection
from retrain.plugins.environments.tools import ToolUse, prepare
from retrain.trainer.episodes import Episodes
from tests.plugins import test_harness
from tests.plugins.test_environments import HOW, Count, play, write

LIMIT_S = 2.0  # of an episode's call
CALL_LIMIT_S = 2.0  # of a tool's call
EPISODES = 4
ONE = replace(HOW, group_size=1)


async def block_in_first(number: int) -> None:
    """Wait twice, and in the first episode block the event loop between for longer than the limit."""
    await asyncio.sleep(0.2 * LIMIT_S)
    if number == 0:
        time.sleep(1.5 * LIMIT_S)
    await asyncio.sleep(0.2 * LIMIT_S)


def check_errors(episodes: Sequence[Episode | None]) -> None:
    found = [(one.error != "", one.timed_out) for one in episodes if one]
    assert found == [(True, True), *[(False, False)] * (EPISODES - 1)]


def test_no_sound_episode_fails_because_another_blocks() -> None:
    class Busy(Count):
        def start(self, prompt: Prompt) -> str:
            self.number = prompt.id
            return "?"

        async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
            await block_in_first(self.number)
            return super().step(completion)

    check_errors([one.episode for one in play(Busy, EPISODES, ONE, time_limit_s=LIMIT_S)])


def test_no_sound_program_fails_because_another_blocks() -> None:
    async def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        await asyncio.to_thread(test_harness.converse(1, []), prompt, base_url, api_key)
        await block_in_first(prompt.id)
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
