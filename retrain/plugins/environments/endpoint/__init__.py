"""Serves the policy of a worker on loopback, to the programs of its episodes.

`POST /v1/chat/completions` and `/inference/v1/generate`, and `GET /v1/models`, for clients whose key is that
of an episode under way. Any program of this machine can connect: one whose key does not come is sent away.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError, wait
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias, TypeVar

from retrain.base.user_code import located
from retrain.plugins.environments.endpoint.chat import (
    ChatRequest,
    GenerateRequest,
    Refusal,
    answer_to,
    read_request,
    tokens_of,
)
from retrain.plugins.environments.endpoint.session import EpisodeSession

T = TypeVar("T")
Served: TypeAlias = tuple[EpisodeSession, asyncio.AbstractEventLoop]  # an episode, and the loop that plays it

LARGEST_BODY_BYTES = 4 << 20  # a longer one takes seconds to tokenize, and fits no context
LONGEST_LENGTH = 12  # digits of a Content-Length; a longer one is no length of anything
IDLE_S = 120.0  # after which a connection without a request is closed
MOST_STRANGERS = 64  # connections whose key has not come yet; further ones wait to be accepted
STRANGER_S = 5.0  # until the key comes
POLL_S = 0.5  # after which a client that waits is looked after
SERVE_POLL_S = 0.05  # of the thread that serves, to see that it should end
JSON, STREAM = "application/json", "text/event-stream; charset=utf-8"
# by address: the form of a request, what samples the turn that it asks for, and what writes the answer
POSTED: Mapping[str, tuple[type[Any], Callable[..., Coroutine[Any, Any, Any]], Callable[..., bytes]]] = {
    "/v1/chat/completions": (ChatRequest, EpisodeSession.chat, answer_to),
    "/inference/v1/generate": (GenerateRequest, EpisodeSession.generate, tokens_of),
}


class Endpoint:
    """A server on a free port of 127.0.0.1."""

    def __init__(self) -> None:
        self._server = _Server(("127.0.0.1", 0), _Handler)
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, args=(SERVE_POLL_S,), name="endpoint", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address that clients take as their `base_url`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @contextmanager
    def serving(self, session: EpisodeSession) -> Iterator[str]:
        """Serve an episode while the body runs, in the running event loop; return its key."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        self._server.served[key] = session, asyncio.get_running_loop()
        try:
            yield key
        finally:
            del self._server.served[key]
            session.end()

    def close(self) -> None:
        """End the server; safe to call twice."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # those of connections that clients keep open
    block_on_close = False
    request_queue_size = 1024  # hundreds of episodes begin at once

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.served: dict[str, Served] = {}
        self._strangers: dict[socket.socket, float] = {}  # until when each may stay
        self._change = threading.Condition()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._change:
            while len(self._strangers) >= MOST_STRANGERS:
                self._change.wait(SERVE_POLL_S)
                self._expire()
            self._strangers[request] = time.monotonic() + STRANGER_S
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections whose key did not come in time; called every `SERVE_POLL_S`."""
        with self._change:
            self._expire()

    def _expire(self) -> None:
        now_s = time.monotonic()
        for connection, until in list(self._strangers.items()):
            if until < now_s:
                del self._strangers[connection]
                with suppress(OSError):  # its client has left
                    connection.shutdown(socket.SHUT_RDWR)

    def admit(self, connection: socket.socket) -> None:
        """Let a connection stay: its client has the key of an episode, or it has ended."""
        with self._change:
            self._strangers.pop(connection, None)
            self._change.notify()

    def shutdown_request(self, request: Any) -> None:
        self.admit(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that hang up."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        try:
            self._served()
            if self.path != "/v1/models":
                raise _unknown(self.path)
        except Refusal as refusal:
            self._send_refusal(refusal)
            return
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "retrain"}
        self._send(200, JSON, json.dumps({"object": "list", "data": [model]}).encode())

    def do_POST(self) -> None:
        try:
            if self._known():
                self.server.admit(self.connection)  # however long its body takes
            body = self._body()  # also of a stranger: else it may read no answer
            session, loop = self._served()
            if self.path not in POSTED:
                raise _unknown(self.path)
            form, sample, write = POSTED[self.path]
            request = read_request(form, body)
            turn = self._turn(sample(session, request, self._has_left), loop)
        except Refusal as refusal:
            self._send_refusal(refusal)
        except CancelledError:
            self._send_refusal(Refusal("the episode is over", status=410, code="episode_over"))
        except Exception as error:  # noqa: BLE001 - a client gets an answer, whatever happens
            print(f"endpoint: {located(error)}", file=sys.stderr, flush=True)  # not to a client: it has paths
            what = f"{type(error).__name__}; the run's output.log says where"
            self._send_refusal(Refusal(what, status=500, kind="server_error"))
        else:
            self._send(200, STREAM if request.stream else JSON, write(request, *turn))

    def _turn(self, sampled: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
        """Return a sampled turn; CancelledError if the episode ends or the client leaves."""
        turn = asyncio.run_coroutine_threadsafe(sampled, loop)
        while not wait([turn], POLL_S).done:
            if self._has_left():
                turn.cancel()  # so that a retry continues the same conversation
        return turn.result()

    def _has_left(self) -> bool:
        """Whether the client has closed the connection, or reset it."""
        readable = select.poll()  # `select.select` knows 1,024 descriptors only
        readable.register(self.connection, select.POLLIN)
        try:
            return bool(readable.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()):
            self.close_connection = True
            raise Refusal("the request has no Content-Length", status=411)
        if len(length) > LONGEST_LENGTH:
            self.close_connection = True
            raise Refusal(f"the Content-Length has {len(length)} digits", status=413)
        if (left := int(length)) > LARGEST_BODY_BYTES:
            while left and (part := self.rfile.read(min(left, 1 << 20))):  # else the client reads no answer
                left -= len(part)
            what = f"the request has {length} bytes; at most {LARGEST_BODY_BYTES} are read"
            raise Refusal(what, status=413)
        return self.rfile.read(left)

    def _served(self) -> Served:
        if (served := self._known()) is None:
            self.close_connection = True
            what = "the API key belongs to no running episode; each episode has a key of its own"
            raise Refusal(what, status=401, kind="authentication_error", code="invalid_api_key")
        self.server.admit(self.connection)
        return served

    def _known(self) -> Served | None:
        """Return the episode whose key the client has, if it is under way."""
        key = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        return self.server.served.get(key)

    def _send_refusal(self, refusal: Refusal) -> None:
        if (known := self._known()) and not self._has_left():  # one who left was refused nothing
            known[0].refused = str(refusal)
        self._send(refusal.status, JSON, json.dumps(refusal.body).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _unknown(path: str) -> Refusal:
    return Refusal(f"no such address: {path}", status=404, code="unknown_url")
