"""Starts the server as a process of its own, and makes the tokenizer of its model."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests.tinker_api.__main__ import main

FORKS = get_context("forkserver")  # by a process that has imported what a server imports, and has no threads
FORKS.set_forkserver_preload([main.__module__])
ROOT = Path(__file__).parent.parent.parent
# Of workers: the tests' plugins, and no PyTorch, as where only the extra `tinker` is installed: the SDK would
# import it, two seconds per worker.
WORKERS_PATH = os.pathsep.join([str(Path(__file__).parent / "without_torch"), str(ROOT)])
MODEL = "test/characters"
KEY = "tml-a-key-that-must-never-be-written-down"


class RunningServer:
    """A server that can be killed, started again on its port, and told to fail."""

    def __init__(self, directory: Path, alphabet: str, *options: str) -> None:
        state = str(directory / "states")
        self._arguments = ["--alphabet", alphabet, "--state", state, "--key", KEY, *options]
        # Bound as long as this exists, so that no connection is given the port while no server listens on it.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self._port = self._reserved.getsockname()[1]
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        told, tells = FORKS.Pipe(duplex=False)
        arguments = [*self._arguments, "--port", str(self._port)]
        self._process = FORKS.Process(target=main, args=(arguments, tells.send), daemon=True)
        self._process.start()
        tells.close()
        assert told.recv() == self._port
        told.close()

    def end(self) -> None:
        """Kill it for good; again is fine."""
        self.kill()
        self._reserved.close()

    def kill(self) -> None:
        """Kill it; it may start again."""
        self._process.kill()
        self._process.join()

    def fail(
        self,
        path: str = "",
        *,
        times: int,
        status: int = 0,
        hang_s: float = 0.0,
        content: dict[str, Any] | None = None,
        is_done: bool = False,
        after: int = 0,
    ) -> None:
        """Have requests fail, `after` so many, with a status or by closing the connection; done or not."""
        fault = {"path": path, "times": times, "status": status, "hang_s": hang_s, "content": content}
        self._post("faults", {**fault, "is_done": is_done, "after": after})

    def pause(self, state: str = "", status: int = 408) -> None:
        """Answer every poll for a result with a state of the queue, until one without a state."""
        self._post("pause", {"state": state, "status": status})

    def forget(self, **said: object) -> None:
        """Lose every session, model and sampler, as when they expire; `said` is the answer about a model."""
        self._post("forget", said)

    def abandon(self) -> str:
        """Open a session with a model, as a worker does that is then killed; return its id."""
        session = self._ask("create_session", {})["session_id"]
        lora = {"rank": 32, "seed": 1}
        made_of = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
        self._ask("create_model", made_of)
        return str(session)

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/admin/stats", timeout=30) as answer:
            return json.load(answer)

    def _ask(self, what: str, content: dict[str, Any]) -> Any:
        url, data = f"{self.url}/api/v1/{what}", json.dumps(content).encode()
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers={"x-api-key": KEY}), timeout=30
        ) as answer:
            return json.load(answer)

    def _post(self, what: str, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        urllib.request.urlopen(f"{self.url}/admin/{what}", data=data, timeout=30).close()


def serve(
    directory: Path, monkeypatch: pytest.MonkeyPatch, alphabet: str, *options: str
) -> Iterator[RunningServer]:
    """Keep a server for a campaign whose workers are given its key."""
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("PYTHONPATH", WORKERS_PATH)
    running = RunningServer(directory, alphabet, *options)
    yield running
    running.end()


def write_tokenizer(directory: Path, alphabet: str, *, end: str | None = "<end>") -> Path:
    """Write a tokenizer of single characters in transformers' format, its end token last."""
    # without transformers, whose import takes seconds that most tests of this process do not need
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = sorted(set(alphabet))
    vocabulary = {character: number for number, character in enumerate([*characters, "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if end is not None:
        tokenizer.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
