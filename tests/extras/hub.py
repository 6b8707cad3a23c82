"""A small hub on loopback: the HTTP endpoints of huggingface.co that a push and a download of a model use.

It has no Xet storage.
Repositories live in memory. `TOKEN` is the token of `USER`, who may write to nobody else's names.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

USER, TOKEN = "somebody", "hf_a-token-that-must-never-be-written-down"
LARGE = 10_000  # bytes; larger files and weights are LFS objects
COMMIT = "0" * 39 + "1"


@dataclass
class Repository:
    """Files by their path, after the last commit."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """An answer instead of the hub's own."""

    status: int
    content: Any  # a text is sent as a page
    headers: dict[str, str] = field(default_factory=dict)


class RefusalError(Exception):
    """An HTTP status instead of an answer."""

    def __init__(self, status: int, text: str, **more: str) -> None:
        super().__init__(text)
        self.status, self.content = status, {"error": text, **more}


class Hub(ThreadingHTTPServer):
    """Everything that it knows, and what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # of LFS, by their SHA-256
        self.failing: dict[str, Answer] = {}  # by the beginning of a path
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def of(self, name: str) -> Repository:
        if name not in self.repositories:
            raise RefusalError(404, "Repository not found")
        return self.repositories[name]

    def create(self, asked: dict[str, Any]) -> Any:
        owner = asked.get("organization") or USER
        name = f"{owner}/{asked['name']}"
        if owner != USER:
            raise RefusalError(
                403, f'You don\'t have the rights to create a model under the namespace "{owner}"'
            )
        if name in self.repositories:
            raise RefusalError(409, "You already created this model repo", url=f"{self.url}/{name}")
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.repositories[name] = Repository(private)
        return {"url": f"{self.url}/{name}", "name": name}

    def validate(self, asked: dict[str, Any]) -> Any:
        front = yaml.safe_load(asked["content"].split("---\n")[1])
        wrong = [key for key in ("base_model", "license") if not isinstance(front.get(key, ""), str)]
        base = front.get("base_model", "a/b")
        if wrong or base.startswith("/"):
            raise RefusalError(400, f'"base_model" with value "{base}" is not valid')
        return {"errors": [], "warnings": []}

    def preupload(self, asked: dict[str, Any]) -> Any:
        return {
            "files": [
                {"path": file["path"], "shouldIgnore": False, "uploadMode": _mode(file)}
                for file in asked["files"]
            ]
        }

    def batch(self, asked: dict[str, Any]) -> Any:
        objects = []
        for one in asked["objects"]:
            found: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in self.objects:
                verify = {"href": f"{self.url}/api/lfs-verify"}
                found["actions"] = {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}, "verify": verify}
            objects.append(found)
        return {"transfer": "basic", "objects": objects}

    def verify(self, asked: dict[str, Any]) -> Any:
        if len(self.objects.get(asked["oid"], b"")) != asked["size"]:
            raise RefusalError(404, "no such object")
        return {}

    def commit(self, name: str, body: bytes) -> Any:
        repository = self.of(name)
        for row in map(json.loads, body.splitlines()):
            value = row["value"]
            if row["key"] == "header":
                repository.messages.append(value["summary"])
            elif row["key"] == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"])
            elif row["key"] == "lfsFile":
                repository.files[value["path"]] = self.objects[value["oid"]]
            elif row["key"] == "deletedFile":
                del repository.files[value["path"]]
        url = f"{self.url}/{name}/commit/{COMMIT}"
        return {"success": True, "commitOid": COMMIT, "commitUrl": url}

    def info(self, name: str) -> Any:
        repository = self.of(name)
        siblings = [{"rfilename": path} for path in repository.files]
        facts = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings}
        return {**facts, "private": repository.private}


def _mode(file: dict[str, Any]) -> str:
    return "lfs" if file["size"] > LARGE or file["path"].endswith(".safetensors") else "regular"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Hub

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def do_PUT(self) -> None:
        body = self._body()
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == oid
        if self._is_injected(self.path):
            return
        self.server.objects[oid] = body
        self._answer(200, b"")

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        body = self._body()
        self._serve(lambda path: self._posted(path, body))

    def _serve(self, answer: Any = None) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(f"{self.command} {path}")
        try:
            if self._is_injected(path):
                return
            if self.headers.get("authorization") != f"Bearer {TOKEN}":
                raise RefusalError(401, "Invalid username or password.")
            found = (answer or self._found)(path)
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self._answer(200, data)
        except RefusalError as refusal:
            self._answer(
                refusal.status, json.dumps(refusal.content).encode(), {"X-Error-Message": str(refusal)}
            )

    def _is_injected(self, path: str) -> bool:
        """Whether it was answered with what was injected for its path."""
        for start, wanted in self.server.failing.items():
            if path.startswith(start):
                is_page = isinstance(wanted.content, str)
                data = wanted.content if is_page else json.dumps(wanted.content)
                kind = {"content-type": "text/html" if is_page else "application/json"}
                self._answer(wanted.status, data.encode(), {**kind, **wanted.headers})
                return True
        return False

    def _posted(self, path: str, body: bytes) -> Any:
        hub, parts = self.server, path.strip("/").split("/")
        if path.endswith("/commit/main"):
            return hub.commit("/".join(parts[2:4]), body)
        asked = json.loads(body)
        fixed = {"repos/create": hub.create, "validate-yaml": hub.validate, "lfs-verify": hub.verify}
        if known := fixed.get(path.removeprefix("/api/")):
            return known(asked)
        if path.endswith("/preupload/main"):
            hub.of("/".join(parts[2:4]))
            return hub.preupload(asked)
        if not path.endswith(".git/info/lfs/objects/batch"):
            raise RefusalError(404, "no such route")
        return hub.batch(asked)

    def _found(self, path: str) -> Any:
        parts = path.strip("/").split("/")
        if parts[4:5] == ["tree"] and path.endswith("/tree/main"):
            files = self.server.of("/".join(parts[2:4])).files.items()
            return [{"type": "file", "path": name, "size": len(data), "oid": COMMIT} for name, data in files]
        if parts[4:5] in (["tree"], ["xet-write-token"]):
            raise RefusalError(404, "Entry not found")
        if parts[:2] == ["api", "models"]:
            return self.server.info("/".join(parts[2:4]))
        files = self.server.of("/".join(parts[:2])).files  # USER/NAME/resolve/REVISION/FILE
        file = "/".join(parts[4:])
        if file not in files:
            raise RefusalError(404, "Entry not found")
        return files[file]

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, status: int, data: bytes, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"', **(more or {})}
        for name, value in {"content-length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound" if "Entry" in str(data) else "RepoNotFound")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve while entered."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
