"""Calls for the turns of episodes: several at a time for a server, and what is told and counted of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from retrain.backends import Sampling
from retrain.backends.progress import EpisodeProgress
from retrain.base.rollouts import NextTurn, Prompt, Rollout
from retrain.config.schema import EnvironmentSection
from retrain.trainer.episodes import Episodes, summary_of
from tests.plugins.test_environments import HOW, Count, write

PATIENCE_S = 60.0
PROMPTS = [Prompt(number, f"p{number}", "") for number in range(2)]
ONE = replace(HOW, group_size=1)


def test_a_server_is_called_while_it_samples_other_turns() -> None:
    is_sampling, is_joined = threading.Event(), threading.Event()

    class Late(Count):
        async def start(self, prompt: Prompt) -> str:  # type: ignore[override]
            if prompt.id == 1:
                await asyncio.to_thread(is_sampling.wait, PATIENCE_S)
            return prompt.text

    def sample(asked: Sequence[Prompt | NextTurn], how: Sampling) -> Sequence[Rollout | None]:
        if any(isinstance(one, Prompt) and one.id == 1 for one in asked):
            is_joined.set()
        elif not is_joined.is_set():
            is_sampling.set()
            assert is_joined.wait(PATIENCE_S)
        return write("x")(asked, how)  # type: ignore[return-value]

    episodes = Episodes(EnvironmentSection(), Late, sample, calls_at_once=2)
    groups = episodes.play(PROMPTS, ONE)
    episodes.close()
    assert [group.rollouts[0].turns for group in groups] == [["x"] * 3] * 2


def test_an_error_in_one_of_several_calls_ends_every_episode() -> None:
    def broken(asked: Sequence[Prompt | NextTurn], how: Sampling) -> list[Rollout | None]:
        raise MemoryError("too many")

    episodes = Episodes(EnvironmentSection(), Count, broken, calls_at_once=4)
    with pytest.raises(MemoryError, match="too many"):
        episodes.play(PROMPTS, HOW)
    episodes.close()


def test_time_in_which_every_episode_waits_is_counted() -> None:
    class Slow(Count):
        async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
            await asyncio.sleep(0.02)
            return super().step(completion)

    episodes = Episodes(EnvironmentSection(), Slow, write("x"))
    rollouts = [group.rollouts[0] for group in episodes.play(PROMPTS, ONE)]
    episodes.close()
    summary = summary_of(rollouts)
    assert summary
    assert summary.environment_wait_s >= 3 * 0.02  # both episodes wait at the same time, three times


def test_progress_is_of_episodes() -> None:
    told: list[EpisodeProgress] = []
    episodes = Episodes(EnvironmentSection(), Count, write("x"), observe=told.append)
    episodes.play(PROMPTS, HOW)
    episodes.close()
    last = max(told, key=lambda one: one.finished)
    assert (last.episodes, last.finished, last.turns, last.tokens) == (4, 4, 12, 24)
    assert str(replace(last, time_s=2.0)) == "4 of 4 episodes done, 12 turns, 24 tokens, 12/s"
