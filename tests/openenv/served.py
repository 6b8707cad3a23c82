"""A server of the package openenv: guess a number from 0 to 4. Arguments: the port, and how many sessions."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Told(Observation):
    told: str = ""


class Game(Environment):
    """Says whether the number is lower or higher; fails on 9."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret, self.played = 0, State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Told:
        self.secret = (seed or 0) % 5
        return Told(told="guess")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Told:
        if action.guess == 9:
            raise RuntimeError("there is no number 9")
        is_right = action.guess == self.secret
        told = "lower" if self.secret < action.guess else "higher"
        return Told(told=told, reward=float(is_right), done=is_right)

    @property
    def state(self) -> State:
        return self.played


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Told, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
