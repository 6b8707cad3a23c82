"""Environments that an OpenEnv server plays: an episode is one session, over one WebSocket.

The policy reads why the server refuses an action. Any other error of the server costs the episode.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from retrain.base.errors import ConfigError
from retrain.base.http_client import is_address, key_of
from retrain.base.redaction import without_user
from retrain.base.registry import Positive
from retrain.base.rollouts import CallForm, Prompt
from retrain.config.schema import Config
from retrain.plugins.environments.episode import EpisodeError
from retrain.plugins.environments.openenv.wire import (
    FULL,
    TABLE,
    WRONG_ACTION,
    RefusalError,
    WebSocketSession,
    fields_of_actions,
)

EXTRA = "openenv"
PACKAGES = ("websockets", "httpx")
JSON = "json"  # in place of a field's name: a completion is the whole action
TEXTS = ("string", "integer", "number")  # types of fields that a completion can fill
FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 1.0  # between attempts to get a session
SESSION_WAIT_S = 30.0
Said: TypeAlias = str | list[Any]


def open_episode(
    server: OpenEnvServer | None = None,
    *,
    url: str,
    action: str = "",
    observation: str = "",
    number: str = "seed",
    reset: Mapping[str, Any] | None = None,
    wrong_action: str = "",
    session_wait_s: Positive = SESSION_WAIT_S,
    key_env: str = "",
) -> Episode:
    """Return an episode.

    Args:
        server: that plays it; by default the one of the options.
        url: address of the server, such as http://localhost:8000.
        action: field of the action that a completion fills; by default the only one that the server requires.
            "json": a completion is the whole action, as JSON.
        observation: field of the observation that the policy reads; by default all of them, as JSON.
        number: parameter of reset that gets the prompt's number; "" for none.
        reset: table of further parameters of reset; columns of the prompt's row are parameters as well.
        wrong_action: what the policy reads if the server refuses an action; by default why.
        session_wait_s: for how long an episode waits for a session, if the server has no other.
        key_env: environment variable with a key, which is sent as a bearer token.
    """
    if server is None:
        options = url, action, observation, number, reset, wrong_action, session_wait_s, key_env
        server = OpenEnvServer(*options)
    return Episode(server)


def prepare(options: Mapping[str, Any], form: CallForm | None) -> OpenEnvServer:
    """Return the server of a run's episodes, which has told what an action consists of."""
    server = OpenEnvServer(**options)
    _ = server.field
    return server


def servers(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the server, as address -> option."""
    return {str(options.get("url", "")): "url"}


def check_options(options: Mapping[str, Any]) -> Iterator[str]:
    """Iterate over the problems of a table, without a request."""
    if not is_address(options["url"]):
        yield f"url: got {options['url']!r}; needs an address, such as http://localhost:8000"
    try:
        key_of(options.get("key_env", ""))
    except ConfigError as error:
        yield str(error)


def check_run(config: Config) -> Iterator[str]:
    """Iterate over the problems of a run's configuration."""
    table = config.environment
    wait_s = float(table.options.get("session_wait_s", SESSION_WAIT_S))
    if wait_s >= table.time_limit_s:
        yield (
            f"[environment.options].session_wait_s: got {wait_s:g}; needs less than "
            f"[environment].time_limit_s = {table.time_limit_s:g}, which would end the episode"
        )


@dataclass(frozen=True)
class OpenEnvServer:
    """A server, and how its actions and observations are read; the fields are the options."""

    url: str
    action: str = ""
    observation: str = ""
    number: str = "seed"
    reset: Mapping[str, Any] | None = None
    wrong_action: str = ""
    session_wait_s: float = SESSION_WAIT_S
    key_env: str = ""

    @property
    def name(self) -> str:
        """The address as messages show it."""
        return without_user(self.url)

    @cached_property
    def field(self) -> str:
        """The field of an action that completions fill, or "json".

        Raises:
            ConfigError: the server does not tell what an action consists of, or it has no such field.
        """
        if self.action == JSON:
            return JSON
        fields, required = fields_of_actions(self.url, key_of(self.key_env))
        fields_text = f"{self.name} knows {', '.join(fields) or 'no field'}"
        if self.action in fields:
            return self.action
        if self.action:
            raise ConfigError(f"{TABLE}.action: got {self.action!r}; of an action, {fields_text}")
        if len(required) == 1 and fields[required[0]].get("type") in TEXTS:
            return required[0]
        raise ConfigError(
            f"{TABLE}.action: name the field that completions fill, or {JSON!r} if they are whole actions; "
            f"{fields_text}, and requires {', '.join(required) or 'none'}"
        )

    def action_of(self, completion: str) -> dict[str, Any]:
        """Return a completion as an action; a ValueError says what is wrong with it."""
        if self.field != JSON:
            return {self.field: completion}
        try:
            action = json.loads(completion)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(action, dict):
            raise ValueError("needs a JSON object")
        return action

    def said(self, told: Mapping[str, Any]) -> Said:
        """Return what the policy reads of an observation."""
        if not self.observation:
            return _as_text({key: value for key, value in told.items() if key != "metadata"})
        if self.observation not in told:
            names = ", ".join(told) or "nothing"
            raise EpisodeError(f"the observation has no {self.observation!r}; it has {names}")
        return _as_text(told[self.observation])

    def close(self) -> None:
        """Nothing is open between episodes."""


class Episode:
    """One session."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._session: WebSocketSession | None = None

    async def start(self, prompt: Prompt) -> Said:
        server = self._server
        number = {server.number: prompt.id} if server.number else {}
        answer = await self._begun({**number, **(server.reset or {}), **prompt.row})
        if answer.get("done"):
            raise EpisodeError("the server's episode was over at its reset")
        return server.said(answer["observation"])

    async def step(self, completion: str) -> tuple[Said, Any, bool]:
        assert self._session is not None
        try:
            answer = await self._session.ask("step", self._server.action_of(completion))
        except ValueError as error:
            return self._server.wrong_action or f"error: the action is not valid JSON: {error}", 0.0, False
        except RefusalError as refusal:
            if refusal.code != WRONG_ACTION:
                raise
            return self._server.wrong_action or f"error: {refusal.message}", 0.0, False
        if answer.get("done"):
            return "", answer.get("reward"), True
        return self._server.said(answer["observation"]), answer.get("reward"), False

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _begun(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the answer to reset, in the first session that the server has free."""
        server, pause_s = self._server, FIRST_WAIT_S
        until_s = time.monotonic() + server.session_wait_s
        while True:
            self._session = await WebSocketSession.opened(server.url, key_of(server.key_env))
            try:
                return await self._session.ask("reset", data)
            except RefusalError as refusal:
                if refusal.code != FULL:
                    raise
                await self._session.close()
                if time.monotonic() + pause_s > until_s:
                    raise EpisodeError(
                        f"{server.name} had no free session for {server.session_wait_s:g} s "
                        f"({refusal.message}); let it serve as many as episodes are played at once"
                    ) from refusal
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_WAIT_S, 2 * pause_s)


def _as_text(value: Any) -> Said:
    """Return a value as a text, or as the conversation that it is."""
    is_said = isinstance(value, list) and all(isinstance(one, dict) and "role" in one for one in value)
    return value if isinstance(value, str) or (value and is_said) else json.dumps(value, ensure_ascii=False)
