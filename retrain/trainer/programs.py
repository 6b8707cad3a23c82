"""Plays episodes of programs that bring their own loop and call the policy at an address of this worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from retrain.backends import Sampling
from retrain.config.schema import Environment
from retrain.environments.coroutine_loop import CoroutineLoop
from retrain.environments.endpoint import Endpoint
from retrain.environments.endpoint.running import run_program
from retrain.environments.endpoint.session import Ask, EpisodeLimits, EpisodeSession, Rendering
from retrain.environments.episode import EpisodeError, EpisodeLostError, EpisodeTimeoutError, finite, told
from retrain.rollouts import Episode, Prompt, Rollout


@dataclass(eq=False)
class Programs:
    """The programs of a run, and the endpoint that serves them."""

    table: Environment
    open_episode: Callable[[], Any]
    rendering: Rendering

    def __post_init__(self) -> None:
        self._endpoint = Endpoint()

    async def play(self, ask: Ask, prompt: Prompt, how: Sampling, loop: CoroutineLoop) -> Rollout:
        """Run a program for a prompt; return its last conversation, with the others in its episode.

        Raises:
            EpisodeLostError: something blocked the event loop that it shares with others.
        """
        began_s = time.perf_counter()
        session = self._session(ask, prompt, how)
        reward, error = await self._run(session, prompt, loop)
        time_s = time.perf_counter() - began_s
        *others, last = [one.rollout for one in session.conversations] or [Rollout(prompt)]
        episode = Episode(
            rewards=(None,) * (session.turns - 1) + (reward,),
            reward=reward,
            error=told(error, prompt),
            timed_out=isinstance(error, EpisodeTimeoutError),
            time_s=time_s,
            environment_s=time_s - session.waited_s,
            others=tuple(others),
            tool_calls=session.calling.count,
        )
        return replace(last, truncated=session.is_cut, episode=episode)

    async def _run(
        self, session: EpisodeSession, prompt: Prompt, loop: CoroutineLoop
    ) -> tuple[float | None, EpisodeError | None]:
        """Return an episode's reward, and why it failed."""
        table = self.table
        try:
            with self._endpoint.serving(session) as key:
                arguments, limit_s = (prompt, self._endpoint.url, key), table.time_limit_s
                given = await run_program(self.open_episode, session, arguments, limit_s, loop.call)
            reward, error = None if given is None else finite("run", given), None
        except EpisodeLostError:
            raise
        except EpisodeError as failure:
            error = None if session.is_cut else failure
            reward = 0.0 if session.is_cut else table.error_reward
        if session.is_cut and table.truncated_reward is not None:
            reward = table.truncated_reward
        return reward, error

    def _session(self, ask: Ask, prompt: Prompt, how: Sampling) -> EpisodeSession:
        table = self.table
        limits = EpisodeLimits(table.max_turns, how.max_tokens, table.max_turn_tokens or how.max_tokens)
        return EpisodeSession(prompt, ask, limits, self.rendering, is_stitched=not table.separate_turns)

    def close(self) -> None:
        """Stop to serve."""
        self._endpoint.close()
