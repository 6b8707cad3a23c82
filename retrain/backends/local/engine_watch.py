"""Watches a sampling server: ends the calls in flight when the run leaves, and reads the server's metrics."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from retrain.backends import BackendSpec
from retrain.engines.metrics import EngineMeter
from retrain.engines.openai import Engine
from retrain.engines.shared_server import ServerFiles, ServerState
from retrain.http_client import without_user

LOOK_S = 0.2  # between checks for a stop
METRICS_EVERY_S = 2.0


class EngineWatch:
    """Watches the client that a run uses at present, from a thread of its own."""

    def __init__(
        self, spec: BackendSpec, engine: Engine, server: ServerFiles | str, is_busy: Callable[[], bool]
    ) -> None:
        """Watch a server: the files of one that is ours, or the address of another."""
        self._spec, self._engine, self._server, self._is_busy = spec, engine, server, is_busy
        self._leaving = threading.Event()
        name = without_user(server) if isinstance(server, str) else str(server.log)
        state = self._state()
        self._meter = EngineMeter(name, state.restarts if state else 0)
        self.take_use = self._meter.take
        self._next_s = 0.0
        threading.Thread(target=_watch, args=(weakref.ref(self), self._leaving), daemon=True).start()

    def replace(self, engine: Engine) -> None:
        """Watch another client from now on."""
        self._engine = engine
        if self._leaving.is_set():
            engine.end_calls()

    def close(self) -> None:
        """End calls that sample for training, now and from now on; safe to call twice."""
        self._leaving.set()
        self._engine.end_calls()

    def look(self) -> None:
        if self._spec.is_leaving():
            self.close()
        now_s = time.monotonic()
        if self._is_busy() and now_s >= self._next_s:
            self._next_s = now_s + METRICS_EVERY_S
            text = self._engine.read_metrics()
            state = self._state()
            crash = f"{state.problem}\n{state.last_lines}".strip() if state else ""
            restarts = state.restarts if state else None
            use = self._meter.look(text, time.monotonic(), restarts, crash) if text else None
            if use is not None:
                self._spec.observe(use)

    def _state(self) -> ServerState | None:
        return None if isinstance(self._server, str) else self._server.read_state()


def _watch(watch: weakref.ref[EngineWatch], leaving: threading.Event) -> None:
    """Look now and then, until the run leaves or nobody holds the watch any more."""
    while not leaving.wait(LOOK_S) and (held := watch()) is not None:
        held.look()
        del held
