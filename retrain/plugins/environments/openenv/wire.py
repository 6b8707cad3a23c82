"""The protocol of OpenEnv servers: a WebSocket is a session, and a page tells what actions consist of.

A request is JSON, {"type": "reset" or "step", "data": {...}}. The answer is {"type": "observation", "data":
{"observation": {...}, "reward": ..., "done": ...}}, or of type "error" with a message and a code.

Source: OpenEnv 0.10, github.com/huggingface/OpenEnv.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

from retrain.base.errors import ConfigError
from retrain.base.extras import load
from retrain.base.http_client import CallError, HttpClient, read_json
from retrain.base.redaction import without_user
from retrain.plugins.environments.episode import EpisodeError, shown

EXTRA = WHO = "openenv"
TABLE = "[environment.options]"
FULL, WRONG_ACTION = "CAPACITY_REACHED", "VALIDATION_ERROR"  # codes of errors
SCHEMA_S = 30.0  # to answer what an action consists of
CONNECT_S = 30.0
CLOSE_S = 2.0  # the server's part of closing a connection, which nothing waits for
LARGEST_MESSAGE = 1 << 26  # bytes


class RefusalError(EpisodeError):
    """The server answered with an error."""

    def __init__(self, what: str, code: str, message: str) -> None:
        super().__init__(f"the server failed in {what}: {message} ({code})")
        self.code, self.message = code, message


class WebSocketSession:
    """A connection, which the server gives an environment of its own."""

    def __init__(self, socket: Any, name: str) -> None:
        self._socket, self._name = socket, name
        self._lost = load("websockets", EXTRA, WHO).ConnectionClosed

    @classmethod
    async def opened(cls, url: str, key: str) -> WebSocketSession:
        """Connect; EpisodeError if that fails."""
        connect = load("websockets.asyncio.client", EXTRA, WHO).connect
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
        except (OSError, ValueError, load("websockets", EXTRA, WHO).WebSocketException) as error:
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


def fields_of_actions(url: str, key: str) -> tuple[dict[str, Any], list[str]]:
    """Return the schemas of an action's fields, and the names of those that are required.

    Raises:
        ConfigError: the server does not tell.
    """
    page = f"{without_user(url)}/schema"
    try:
        with closing(HttpClient(url, key=key, timeout_s=SCHEMA_S, extra=EXTRA, who=WHO)) as client:
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
        if kind == "error":
            raise RefusalError(what, str(data.get("code", "no code")), _told(data))
        is_whole = isinstance(data.get("observation"), dict) and isinstance(data.get("done", False), bool)
        if kind == "observation" and is_whole:
            return data
    raise EpisodeError(f"the server answered {what} with {shown(answer)}; needs an observation")


def _told(data: Mapping[str, Any]) -> str:
    """Return the message of an error, with what is wrong with each field of an action."""
    wrong = data.get("errors")
    fields = [one for one in wrong if isinstance(one, dict)] if isinstance(wrong, list) else []
    each = [f"{'.'.join(map(str, one.get('loc') or ()))}: {one.get('msg')}" for one in fields]
    return "; ".join([str(data.get("message", "no message")), *each])
