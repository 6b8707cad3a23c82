"""The HTTP side: routes, long polling, injected faults, and the count of requests in flight."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote

from tests.tinker_api.exports import Signed
from tests.tinker_api.policies import WRONG
from tests.tinker_api.service import Service, routes
from tests.tinker_api.states import RefusalError
from tests.tinker_api.wire import read_forward_backward

LONG_POLL_S = 2.0
PAUSED_POLL_S = 0.05  # of a call that is paused
HOUSEKEEPING = ("client/dynamic_config", "telemetry", "session_heartbeat")  # what the SDK sends unasked
PREFIX = "/api/v1/"


OVERLOADED = {"status": 429, "hang_s": 0.0}


class Traffic:
    """Counts requests that hold a permit, and picks those that are to fail."""

    def __init__(self, capacity: int = 10**6) -> None:
        self._lock = threading.Lock()
        self._capacity = capacity
        self._faults: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0
        self.requests: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def begin(self, path: str) -> dict[str, Any] | None:
        """Count a request; give the fault that it is to meet."""
        with self._lock:
            if not path.startswith(HOUSEKEEPING):
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                self.requests[path] += 1
                if self.in_flight > self._capacity:
                    self.failed["overload"] += 1
                    return OVERLOADED
            fault = next(
                (f for f in self._faults if path.startswith(f.get("path", "")) and f["times"] > 0), None
            )
            if fault is None or path.startswith(HOUSEKEEPING):
                return None
            if fault.get("after", 0):
                fault["after"] -= 1
                return None
            fault["times"] -= 1
            self.failed[str(fault.get("status", "dropped"))] += 1
            return fault

    def end(self, path: str) -> None:
        with self._lock:
            if not path.startswith(HOUSEKEEPING):
                self.in_flight -= 1

    def inject(self, fault: dict[str, Any]) -> None:
        with self._lock:
            self._faults.append(fault)

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {
                "most_in_flight": self.most_in_flight,
                "requests": dict(self.requests),
                "failed": dict(self.failed),
            }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ApiServer

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        if self.path == "/admin/stats":
            self._answer(200, self._stats())
            return
        if self.path.startswith("/signed/"):
            self._answer(*self.server.signed.file(self.path))
            return
        if self.path.endswith("/external_weights_urls"):
            self._about_state(self.server.signed.urls)
            return
        kind, _, name = unquote(self.path.removeprefix(PREFIX)).partition("/")
        service = self.server.service
        told = {
            "samplers": lambda: service.sampler_info(name),
            "get_server_capabilities": service.capabilities,
            "healthz": service.health,
        }
        self._guarded(told.get(kind, _no_route))

    def _stats(self) -> dict[str, Any]:
        service = self.server.service
        return {
            **self.server.traffic.stats(),
            "updates": service.updates,
            "sessions": len(service.sessions),
            "models": len(service.models),
            "billed": service.bill.tokens,
            "stops": sorted(service.stops),
            "paused": len(self.server.paused_calls),
        }

    def do_DELETE(self) -> None:
        self._about_state(self.server.service.states.delete)

    def do_PUT(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        self._about_state(lambda path: self.server.service.states.set_ttl(path, body["ttl_seconds"]))

    def _about_state(self, do: Callable[[str], dict[str, Any]]) -> None:
        """Answer a request to training_runs/MODEL/checkpoints/KIND/NAME."""
        what = unquote(self.path.removeprefix(PREFIX)).split("/")
        self._guarded(lambda: do(f"tinker://{what[1]}/{what[3]}/{what[4]}"))

    def _guarded(self, do: Callable[[], dict[str, Any]]) -> None:
        """Answer a request for which nothing is promised."""
        try:
            answer = 200, do()
        except RefusalError as refusal:
            answer = refusal.status, {"error": str(refusal)}
        self._answer(*answer)

    def do_POST(self) -> None:
        announced = int(self.headers.get("content-length", 0))
        body = self.rfile.read(announced)
        if len(body) < announced:
            raise ConnectionAbortedError
        if self.path.startswith("/admin/"):
            self._administer(self.path.removeprefix("/admin/"), json.loads(body))
            return
        path = self.path.removeprefix(PREFIX)
        fault = self.server.traffic.begin(path)
        try:
            status, content = self._do(path, body, fault)
        finally:
            self.server.traffic.end(path)  # before the answer, after which the client may send the next
        if status == 0:
            self.close_connection = True
            return
        self._answer(status, content)

    def _administer(self, what: str, request: dict[str, Any]) -> None:
        if what == "faults":
            self.server.traffic.inject(request)
        elif what == "pause":
            self.server.paused_calls.clear()
            self.server.paused, self.server.paused_status = request["state"], request["status"]
        else:
            self.server.service.forget(**request)
        self._answer(200, {})

    def _do(self, path: str, body: bytes, fault: dict[str, Any] | None) -> tuple[int, dict[str, Any] | bytes]:
        time.sleep(fault["hang_s"] if fault else self.server.latency_s)
        if fault is not None and fault.get("is_done"):  # and nobody learns of it
            self._done(path, body)
        if fault is not None:
            return fault.get("status", 0), fault.get("content") or {"error": "an injected fault"}
        if not self.headers.get("x-api-key", "").startswith(self.server.key):
            return 401, {"error": "wrong key"}
        return self._done(path, body)

    def _done(self, path: str, body: bytes) -> tuple[int, dict[str, Any] | bytes]:
        try:
            if path == "retrieve_future":
                return self._poll(json.loads(body)["request_id"])
            if path == "forward_backward":
                encoding = self.headers.get("content-encoding", "")
                return 200, self.server.service.forward_backward(read_forward_backward(body, encoding))
            if path.startswith("sessions/"):
                return 200, self.server.service.finish_session(path.split("/")[1])
            return 200, self.server.routes[path](json.loads(body))
        except RefusalError as refusal:
            return refusal.status, {"error": str(refusal)}

    def _poll(self, request_id: str) -> tuple[int, dict[str, Any] | bytes]:
        future = self.server.service.future(request_id)
        if state := self.server.paused:
            self.server.paused_calls.add(request_id)
            time.sleep(PAUSED_POLL_S)
            answer = {"type": "try_again", "request_id": request_id, "queue_state": state}
            return self.server.paused_status, answer
        if not future.done.wait(LONG_POLL_S):
            return 408, {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        if self.server.service.dialect == "json" and isinstance(future.result, bytes):
            return 200, {"type": "a result of an older server"}
        return 200, future.result

    def _answer(self, status: int, content: dict[str, Any] | bytes) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        kind = "application/x-protobuf" if isinstance(content, bytes) else "application/json"
        with suppress(OSError):  # the client left
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


def _no_route() -> NoReturn:
    raise RefusalError(404, "no such route")


class ApiServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, service: Service, latency_s: float, key: str, capacity: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.service, self.routes = service, routes(service)
        self.paused = ""  # the state of its queue that every poll is told, "" if it works
        self.paused_status = 408
        self.paused_calls = set[str]()  # that were told so during the last pause
        self.signed = Signed(service.states, f"http://127.0.0.1:{self.server_address[1]}")
        self.traffic, self.latency_s, self.key = Traffic(capacity), latency_s, key

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave out clients that were killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def main(arguments: Sequence[str], tell: Callable[[int], object]) -> None:
    """Serve for ever, and tell the port."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--alphabet", required=True)
    parser.add_argument("--model", default="test/characters")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds that each request takes longer")
    parser.add_argument("--capacity", type=int, default=10**6, help="more requests at once get 429")
    parser.add_argument("--chunk", type=int, default=1024, help="most datums of one request")
    parser.add_argument("--most-models", type=int, default=10**6, help="more models at once are refused")
    parser.add_argument("--context", type=int, default=0, help="tokens that the model reads; 0: not told")
    parser.add_argument("--dialect", default="", choices=("", "json", "unnumbered", "silent"))
    parser.add_argument("--wrong", action="append", default=[], choices=WRONG)
    parser.add_argument("--key", default="tml-", help="what a valid key begins with")
    options = parser.parse_args(arguments)
    options.state.mkdir(parents=True, exist_ok=True)
    service = Service(
        options.state,
        options.alphabet,
        options.model,
        options.chunk,
        options.most_models,
        options.dialect,
        options.wrong,
    )
    service.context = options.context
    server = ApiServer(options.port, service, options.latency, options.key, options.capacity)
    tell(server.server_address[1])
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:], partial(print, flush=True))
