"""Asks a TOML language server what an editor would ask it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any


class Editor:
    """An open file in an editor that speaks the language server protocol."""

    def __init__(self, command: list[str], file: Path) -> None:
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._uri = file.as_uri()
        self._asked = 0
        folder = file.parent.as_uri()
        self._problems: list[dict[str, Any]] = []
        self.ask(
            "initialize",
            {
                "processId": None,
                "rootUri": folder,
                "workspaceFolders": [{"uri": folder, "name": "here"}],
                "capabilities": {"workspace": {"configuration": True}},
            },
        )
        self._tell("initialized", {})
        self._version = 0

    def open(self, text: str) -> None:
        """Show the server the file's text."""
        self._version += 1
        document = {"uri": self._uri, "languageId": "toml", "version": self._version, "text": text}
        if self._version == 1:
            self._tell("textDocument/didOpen", {"textDocument": document})
        else:
            changed = {"textDocument": document, "contentChanges": [{"text": text}]}
            self._tell("textDocument/didChange", changed)

    def complete(self, text: str) -> set[str]:
        """Return what is offered at the place marked by `|`."""
        line, column = text[: text.index("|")].count("\n"), len(text[: text.index("|")].rpartition("\n")[2])
        self.open(text.replace("|", ""))
        where = {"textDocument": {"uri": self._uri}, "position": {"line": line, "character": column}}
        found = self.ask("textDocument/completion", where) or []
        items = found["items"] if isinstance(found, dict) else found
        return {item["label"].strip('"') for item in items}

    def problems(self, text: str) -> list[str]:
        """Return what would be underlined."""
        self._problems.clear()
        self.open(text)
        self.ask("textDocument/foldingRange", {"textDocument": {"uri": self._uri}})
        while not self._problems:
            self._receive()
        return [problem["message"] for problem in self._problems[-1]["diagnostics"]]

    def close(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.communicate()

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        """Send a request, and wait for its answer."""
        self._asked += 1
        mine = self._asked
        self._send({"jsonrpc": "2.0", "id": mine, "method": method, "params": params})
        while True:
            message = self._receive()
            if message.get("id") == mine and "method" not in message:
                assert "error" not in message, message
                return message.get("result")

    def _tell(self, method: str, params: dict[str, Any]) -> None:
        self._send({"jsonrpc": "2.0", "method": method, "params": params})

    def _receive(self) -> dict[str, Any]:
        out = self._server.stdout
        assert out is not None
        size = 0
        while (line := out.readline().strip()) or size == 0:
            assert line, "the server is gone"
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        message: dict[str, Any] = json.loads(out.read(size))
        if message.get("method") == "textDocument/publishDiagnostics":
            self._problems.append(message["params"])
        elif "id" in message and "method" in message:  # a question of the server's own
            count = len((message.get("params") or {}).get("items", []))
            answer = [None] * count if message["method"] == "workspace/configuration" else None
            self._send({"jsonrpc": "2.0", "id": message["id"], "result": answer})
        return message

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        stream = self._server.stdin
        assert stream is not None
        stream.write(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        stream.flush()
