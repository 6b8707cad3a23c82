"""Environments that an OpenEnv server plays: an episode is one session, over one WebSocket.

The policy reads why the server refuses an action. Any other error of the server costs the episode.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from retrain.base.errors import ConfigError
from retrain.base.extras import load
from retrain.base.http_client import CallError, HttpClient, is_address, key_of, read_json
from retrain.base.redaction import without_user
from retrain.base.registry import Positive
from retrain.base.rollouts import CallForm, Prompt
from retrain.config.schema import Config
from retrain.plugins.environments.episode import EpisodeError, shown

TABLE = "[environment.options]"
FULL, WRONG_ACTION = "CAPACITY_REACHED", "VALIDATION_ERROR"  # codes of errors
SCHEMA_S = 30.0  # to answer what an action consists of
CONNECT_S = 30.0
CLOSE_S = 2.0  # the server's part of closing a connection, which nothing waits for
LARGEST_MESSAGE = 1 << 26  # bytes
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

    @cached_property
    def field(self) -> str:
        """The field of an action that completions fill, or "json"; a ConfigError if the server has none."""
        if self.action == JSON:
            return JSON
        fields, required = fields_of_actions(self.url, key_of(self.key_env))
        fields_text = f"{without_user(self.url)} knows {', '.join(fields) or 'no field'}"
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

    def said(self, observation: Mapping[str, Any]) -> Said:
        """Return what the policy reads of an observation, as a text, or as the conversation that it is."""
        value: Any = {key: value for key, value in observation.items() if key != "metadata"}
        if self.observation:
            if self.observation not in observation:
                names = ", ".join(observation) or "nothing"
                raise EpisodeError(f"the observation has no {self.observation!r}; it has {names}")
            value = observation[self.observation]
        is_said = isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)
        if isinstance(value, str) or (value and is_said):
            return value
        return json.dumps(value, ensure_ascii=False)

    def close(self) -> None:
        """Nothing is open between episodes."""


class Episode:
    """One session."""

    def __init__(self, server: OpenEnvServer) -> None:
        self._server = server
        self._session: WebSocketSession | None = None

    async def start(self, prompt: Prompt) -> Said:
        server, pause_s = self._server, FIRST_WAIT_S
        number = {server.number: prompt.id} if server.number else {}
        options = {**number, **(server.reset or {}), **prompt.row}
        until_s = time.monotonic() + server.session_wait_s
        while True:
            self._session = await WebSocketSession.opened(server.url, key_of(server.key_env))
            try:
                answer = await self._session.ask("reset", options)
                break
            except RefusalError as refusal:
                if refusal.code != FULL:
                    raise
                await self._session.close()
                if time.monotonic() + pause_s > until_s:
                    raise EpisodeError(
                        f"{without_user(server.url)} had no free session for {server.session_wait_s:g} s "
                        f"({refusal.message}); let it serve as many as episodes are played at once"
                    ) from refusal
            await asyncio.sleep(pause_s)
            pause_s = min(LONGEST_WAIT_S, 2 * pause_s)
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


class WebSocketSession:
    """A connection, which the server gives an environment of its own."""

    def __init__(self, socket: Any, name: str) -> None:
        self._socket, self._name = socket, name
        self._lost = load("websockets", EXTRA, EXTRA).ConnectionClosed

    @classmethod
    async def opened(cls, url: str, key: str) -> WebSocketSession:
        """Connect; EpisodeError if that fails."""
        connect = load("websockets.asyncio.client", EXTRA, EXTRA).connect
        parts, name = urlsplit(url), without_user(url)
        try:
            socket = await connect(
                f"ws{url[len('http') :].rstrip('/')}/ws",
                # named, so that no redirect leads to another server, which would get the key
                host=parts.hostname,
                port=parts.port or (443 if parts.scheme == "https" else 80),
                additional_headers={"Authorization": f"Bearer {key}"} if key else None,
                open_timeout=CONNECT_S,
                close_timeout=CLOSE_S,
                ping_timeout=None,  # an environment that computes may not answer; calls have a limit
                max_size=LARGEST_MESSAGE,
            )
        except (OSError, ValueError, load("websockets", EXTRA, EXTRA).WebSocketException) as error:
            raise EpisodeError(f"no connection to {name} ({error or type(error).__name__})") from error
        return cls(socket, name)

    async def ask(self, what: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the data of the answer; RefusalError if it is an error, EpisodeError if it is none."""
        request = json.dumps({"type": what, "data": data}, default=str)
        try:
            with suppress(self._lost):  # why the server has closed it may be there to be read
                await self._socket.send(request)
            answer = await self._socket.recv()
        except self._lost as error:
            raise EpisodeError(f"{self._name} closed the connection in {what} ({error})") from error
        return _read(what, answer)

    async def close(self) -> None:
        """End the session."""
        with suppress(self._lost):
            await self._socket.send('{"type": "close"}')
        await self._socket.close()


class RefusalError(EpisodeError):
    """The server answered with an error."""

    def __init__(self, what: str, code: str, message: str) -> None:
        super().__init__(f"the server failed in {what}: {message} ({code})")
        self.code, self.message = code, message


def fields_of_actions(url: str, key: str) -> tuple[dict[str, Any], list[str]]:
    """Return the schemas of an action's fields and the names of required ones; a ConfigError if not told."""
    page = f"{without_user(url)}/schema"
    try:
        with closing(HttpClient(url, key=key, timeout_s=SCHEMA_S, extra=EXTRA, who=EXTRA)) as client:
            schema = read_json(client.get("/schema"), client.masked)["action"]
        fields = {name: one for name, one in schema["properties"].items() if name != "metadata"}
        return fields, [name for name in schema.get("required", ()) if name in fields]
    except CallError as error:
        raise ConfigError(
            f"{TABLE}.url: {page} does not tell what an action consists of ({error})"
        ) from error
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{TABLE}.url: {page} is no schema of an OpenEnv server") from error


def _read(what: str, answer: str | bytes) -> Mapping[str, Any]:
    """Return the data of an answer to a request."""
    try:
        message = json.loads(answer)
    except (ValueError, RecursionError):
        message = None
    kind, data = (message.get("type"), message.get("data")) if isinstance(message, dict) else (None, None)
    if isinstance(data, dict):
        if kind == "error":  # with what is wrong with each field of an action
            wrong = data.get("errors")
            fields = [each for each in wrong if isinstance(each, dict)] if isinstance(wrong, list) else []
            each = [f"{'.'.join(map(str, one.get('loc') or ()))}: {one.get('msg')}" for one in fields]
            text = "; ".join([str(data.get("message", "no message")), *each])
            raise RefusalError(what, str(data.get("code", "no code")), text)
        is_whole = isinstance(data.get("observation"), dict) and isinstance(data.get("done", False), bool)
        if kind == "observation" and is_whole:
            return data
    raise EpisodeError(f"the server answered {what} with {shown(answer)}; needs an observation")
