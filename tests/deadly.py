"""A game of which one call is the last of its worker: with plain functions, coroutines, or a loop of its own.

It imports little, because processes that play episodes import it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from typing import Any

from retrain.base.rollouts import Prompt
from retrain.plugins.environments.guess import Game
from tests.asking import complete, spoken, user

CALLS, WORKER = "RETRAIN_TEST_CALLS", "RETRAIN_TEST_WORKER"  # variables: until the kill, and whose
TURNS = 4
_calls = itertools.count(1)  # of this process


class Deadly(Game):
    """Guess a number, with an answer to guesses of any form."""

    def start(self, prompt: Prompt) -> str:
        _live_on()
        return super().start(prompt)

    def step(self, completion: str) -> tuple[str, float, bool]:
        _live_on()
        signs, reward, is_over = super().step(completion)
        in_form = bool(signs)
        return (
            (signs, reward, is_over) if in_form else ("?", 0.02 * sum(map(str.isdecimal, completion)), False)
        )


class Awaiting(Deadly):
    """The same with coroutines."""

    async def start(self, prompt: Prompt) -> str:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().start(prompt)

    async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
        await asyncio.sleep(0.001)
        return super().step(completion)


class Program:
    """The same as a program that asks for turns."""

    def run(self, prompt: Prompt, base_url: str, api_key: str) -> float:
        game = Deadly()
        said: list[dict[str, Any]] = [user(game.start(prompt))]
        reward = 0.0
        for _ in range(TURNS):
            answer = spoken(complete(base_url, api_key, said))
            observation, reward, is_over = game.step(answer["content"])
            if is_over:
                break
            said += [answer, user(observation)]
        return reward


def _live_on() -> None:
    if next(_calls) == int(os.environ.get(CALLS, 0)):
        os.kill(int(os.environ[WORKER]), signal.SIGKILL)
