"""Plays episodes of programs that bring their own loop and call the policy at an address of this worker."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from retrain.backends import Sampling
from retrain.config.schema import Environment
from retrain.environments.endpoint.running import run_program
from retrain.environments.endpoint.server import Endpoint
from retrain.environments.endpoint.session import Ask, Limits, Read, Session, Shown
from retrain.environments.episode import EpisodeError, EpisodeLostError, EpisodeTimeoutError, finite, told
from retrain.environments.own_loop import OwnLoop
from retrain.rollouts import CallForm, Episode, Prompt, Rollout


class Programs:
    """The programs of a run, and the endpoint that serves them."""

    def __init__(
        self,
        table: Environment,
        open_episode: Callable[[], Any],
        *,
        has_template: bool = False,
        read: Read | None = None,
        shown: Shown | None = None,
        call_form: Callable[[Sequence[Mapping[str, Any]]], CallForm] | None = None,
    ) -> None:
        """Start to serve; see `Session` for `has_template`, `read` and `shown`.

        `call_form` is the backend's: schemas -> how the policy writes calls of functions.
        """
        self._form_of = cache(lambda schemas: call_form(json.loads(schemas))) if call_form else None
        self._table, self._open = table, open_episode
        self._has_template, self._read, self._shown = has_template, read, shown
        self._endpoint = Endpoint()

    async def play(self, ask: Ask, prompt: Prompt, how: Sampling, loop: OwnLoop) -> Rollout:
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
        self, session: Session, prompt: Prompt, loop: OwnLoop
    ) -> tuple[float | None, EpisodeError | None]:
        """Return an episode's reward, and why it failed."""
        table = self._table
        try:
            with self._endpoint.serving(session) as key:
                arguments = prompt, self._endpoint.url, key
                given = await run_program(self._open, session, arguments, table.time_limit_s, loop.call)
            reward, error = None if given is None else finite("run", given), None
        except EpisodeLostError:
            raise
        except EpisodeError as failure:
            error = None if session.is_cut else failure
            reward = 0.0 if session.is_cut else table.error_reward
        if session.is_cut and table.truncated_reward is not None:
            reward = table.truncated_reward
        return reward, error

    def _session(self, ask: Ask, prompt: Prompt, how: Sampling) -> Session:
        turn_tokens = self._table.max_turn_tokens or how.max_tokens
        return Session(
            prompt,
            ask,
            Limits(self._table.max_turns, how.max_tokens, turn_tokens),
            has_template=self._has_template,
            read=self._read,
            shown=self._shown,
            form_of=self._form_of,
            is_stitched=not self._table.separate_turns,
        )

    def close(self) -> None:
        """Stop to serve."""
        self._endpoint.close()
