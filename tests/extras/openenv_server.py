"""A server that speaks OpenEnv's protocol: a number is to be guessed, and some actions make it fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

FIELDS = {"guess": {"type": "integer"}, "metadata": {"type": "object"}}
NONSENSE = {
    "text": "not JSON",
    "list": "[1]",
    "kind": '{"type": "state", "data": {}}',
    "bare": '{"type": "observation", "data": {"observation": "lower"}}',
    "done": '{"type": "observation", "data": {"observation": {}, "done": "yes"}}',
    "nan": '{"type": "observation", "data": {"observation": {}, "reward": NaN, "done": true}}',
}


@dataclass
class Server:
    """What it is asked, and how it answers."""

    action: dict[str, Any] = field(default_factory=lambda: {"properties": FIELDS, "required": ["guess"]})
    sessions: int = 100
    key: str = ""
    url: str = ""
    resets: list[Any] = field(default_factory=list)
    active: int = 0
    most: int = 0  # sessions at a time
    refused: int = 0

    def page(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a request of plain HTTP; None for a WebSocket."""
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return connection.respond(
                HTTPStatus.UNAUTHORIZED, f"{request.headers.get('Authorization')} is wrong"
            )
        if request.path == "/schema":
            return connection.respond(HTTPStatus.OK, json.dumps({"action": self.action, "observation": {}}))
        return None if request.path == "/ws" else connection.respond(HTTPStatus.OK, "healthy")

    async def play(self, socket: ServerConnection) -> None:
        if self.active >= self.sessions:
            self.refused += 1
            said = {"message": f"all {self.sessions} sessions are active", "code": "CAPACITY_REACHED"}
            await socket.send(json.dumps({"type": "error", "data": said}))
            return
        self.active += 1
        self.most = max(self.most, self.active)
        try:
            await self._answer_all(socket)
        except ConnectionClosed:
            return
        finally:
            self.active -= 1

    async def _answer_all(self, socket: ServerConnection) -> None:
        secret = 0
        async for line in socket:
            request = json.loads(line)
            if request["type"] == "close":
                return
            if request["type"] == "reset":
                self.resets.append(request["data"])
                secret = request["data"].get("seed", 0) % 5
                await socket.send(_observation("guess"))
                continue
            action = str(request["data"].get("guess"))
            if action == "die":
                socket.transport.abort()
            elif action == "sleep":
                await socket.wait_closed()
            elif action == "raise":
                await socket.send(_error("the board is on fire", "EXECUTION_ERROR"))
            elif action in NONSENSE:
                await socket.send(NONSENSE[action])
            elif not action.isdecimal():
                wrong = [{"loc": ["guess"], "msg": "Input should be a valid integer", "type": "int_parsing"}]
                await socket.send(_error("Invalid message", "VALIDATION_ERROR", errors=wrong))
            else:
                is_right = int(action) == secret
                told = "" if is_right else "lower" if secret < int(action) else "higher"
                await socket.send(_observation(told, float(is_right), is_right))


def _observation(told: str, reward: float | None = None, done: bool = False) -> str:
    observed = {"told": told, "metadata": {"turn": 1}}
    return json.dumps(
        {"type": "observation", "data": {"observation": observed, "reward": reward, "done": done}}
    )


def _error(message: str, code: str, **more: object) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}})


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serve on a free port of 127.0.0.1 while the body runs."""
    loop, is_open = asyncio.new_event_loop(), threading.Event()
    to_end = asyncio.Event()

    async def run() -> None:
        async with serve(server.play, "127.0.0.1", 0, process_request=server.page) as served:
            port = served.sockets[0].getsockname()[1]
            server.url = f"http://127.0.0.1:{port}"
            is_open.set()
            await to_end.wait()
            for connection in list(served.connections):
                connection.transport.abort()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert is_open.wait(60)
        yield server
    finally:
        loop.call_soon_threadsafe(to_end.set)
        thread.join()
        loop.close()
