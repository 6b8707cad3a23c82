"""The server of programs' turns withstands strangers: any program of this machine can connect to it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from retrain.plugins.environments import endpoint as module
from retrain.plugins.environments.endpoint import MOST_STRANGERS, Endpoint
from retrain.plugins.environments.endpoint.chat import ChatRequest

PATIENCE_S = 30.0


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with closing(Endpoint()) as served:
        yield served


def address_of(endpoint: Endpoint) -> tuple[str, int]:
    parts = urlsplit(endpoint.url)
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port


def answer_of(
    endpoint: Endpoint, method: str, path: str, headers: dict[str, str]
) -> tuple[int, dict[str, object]]:
    with closing(http.client.HTTPConnection(*address_of(endpoint), timeout=PATIENCE_S)) as client:
        client.putrequest(method, path)
        for name, value in headers.items():
            client.putheader(name, value)
        client.endheaders()
        answer = client.getresponse()
        return answer.status, json.loads(answer.read())


@pytest.mark.parametrize("path", ["/v1/models", "/v1/other"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_nothing_is_told_without_a_key(endpoint: Endpoint, path: str, method: str) -> None:
    headers = {"Authorization": "Bearer other", "Content-Length": "0"}
    status, body = answer_of(endpoint, method, path, headers)
    assert status == 401
    assert "data" not in body


@pytest.mark.parametrize("length", ["9" * 13, "9" * 5000, "\xb2"])
def test_a_length_that_is_none_is_refused_before_it_is_read(endpoint: Endpoint, length: str) -> None:
    status, _ = answer_of(endpoint, "POST", "/v1/chat/completions", {"Content-Length": length})
    assert status in (411, 413)


def test_an_error_of_ours_shows_a_client_no_path(
    endpoint: Endpoint, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> object:
        raise OSError("no room in /srv/model/weights")

    monkeypatch.setattr(module, "POSTED", {"/v1/x": (ChatRequest, fail, None)})
    monkeypatch.setattr(module, "read_request", lambda *_: None)
    endpoint._server.served["key"] = SimpleNamespace(refused=""), None  # type: ignore[assignment]
    headers = {"Content-Length": "0", "Authorization": "Bearer key"}
    status, body = answer_of(endpoint, "POST", "/v1/x", headers)
    assert status == 500
    assert "/" not in json.dumps(body)
    assert "no room in /srv/model/weights" in capsys.readouterr().err


def test_who_sends_no_key_is_sent_away_and_keeps_nobody_out(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STRANGER_S", 0.5)
    with ExitStack() as stack:
        silent = [
            stack.enter_context(closing(socket.create_connection(address_of(endpoint), PATIENCE_S)))
            for _ in range(2 * MOST_STRANGERS)
        ]
        assert sum("process_request" in thread.name for thread in threading.enumerate()) <= MOST_STRANGERS
        assert answer_of(endpoint, "GET", "/v1/models", {})[0] == 401  # once there is room
        assert all(one.recv(1) == b"" for one in silent)


def test_a_client_with_a_key_may_take_its_time(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRANGER_S", 0.5)
    endpoint._server.served["key"] = SimpleNamespace(refused=""), None  # type: ignore[assignment]
    head = b"POST /v1/x HTTP/1.1\r\nAuthorization: Bearer key\r\nContent-Length: 1\r\n\r\n"
    with ExitStack() as stack:
        slow, silent = (
            stack.enter_context(closing(socket.create_connection(address_of(endpoint), PATIENCE_S)))
            for _ in range(2)
        )
        slow.sendall(head)
        assert silent.recv(1) == b""  # sent away, later than the other would have been
        slow.sendall(b"x")
        assert slow.recv(12) == b"HTTP/1.1 404"
