"""Watches a sampling server: ends the calls in flight when the run leaves, and reads the server's metrics."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

from retrain.backends import BackendSpec
from retrain.engines.metrics import EngineMeter
from retrain.engines.openai import Engine
from retrain.http_client import without_user

LOOK_S = 0.2  # between checks for a stop
METRICS_EVERY_S = 2.0


class EngineWatch:
    """Watches the client that a run uses at present, from a thread of its own."""

    def __init__(self, spec: BackendSpec, engine: Engine, server: str, is_busy: Callable[[], bool]) -> None:
        self._spec, self._engine, self._is_busy = spec, engine, is_busy
        self._leaving = threading.Event()
        self._meter = EngineMeter(without_user(server))
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
            use = self._meter.look(text, time.monotonic()) if text else None
            if use is not None:
                self._spec.observe(use)


def _watch(watch: weakref.ref[EngineWatch], leaving: threading.Event) -> None:
    """Look now and then, until the run leaves or nobody holds the watch any more."""
    while not leaving.wait(LOOK_S) and (held := watch()) is not None:
        held.look()
        del held
