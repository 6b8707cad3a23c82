"""What a server says of its load, in the text format of Prometheus at `/metrics`, and the watch that asks."""

from __future__ import annotations

import re
import threading
import time
import weakref

from retrain.backends import BackendSpec
from retrain.backends.engines.openai import Engine
from retrain.backends.engines.shared_server import ServerFiles, ServerState
from retrain.backends.rows import CallsProgress
from retrain.base.redaction import without_user
from retrain.records.row_parts import EngineUse

POLL_S = 0.2  # between checks for a stop
METRICS_EVERY_S = 2.0
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
KV_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
TOKENS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
LINE = re.compile(r"^([a-z_]+:[a-z_]+)(?:\{.*\})? (\d+(?:\.\d*)?(?:[eE][+-]?\d\d?)?)$", re.MULTILINE)


class EngineMeter:
    """Sums up what a server said since the last `take`; from any thread."""

    def __init__(self, server: str, restarts: int = 0) -> None:
        """Begin with a server that has been started again so often, if that is known."""
        self._server = server
        self._restarts = restarts
        self._crash: str | None = None  # the last one, until it is taken
        self._lock = threading.Lock()
        self._seen: list[EngineUse] = []
        self._first: tuple[float, float] | None = None  # when tokens were counted, and their number
        self._last: tuple[float, float] | None = None

    def observe(
        self, text: str, now_s: float, restarts: int | None = None, crash: str = ""
    ) -> EngineUse | None:
        """Return what a text says; None if it is of another kind of server.

        `restarts` counts those of a server of ours so far, and `crash` says why it was the last time.
        """
        values: dict[str, list[float]] = {}
        for name, value in LINE.findall(text):
            values.setdefault(name, []).append(float(value))
        running, waiting, kv_use, tokens = (
            next((values[name] for name in names if name in values), [])
            for names in (RUNNING, WAITING, KV_USE, TOKENS)
        )
        if not running:
            return None
        with self._lock:
            before, self._last = self._last, (now_s, sum(tokens)) if tokens else None
            self._first = self._first or self._last
            use = EngineUse(
                running=int(sum(running)),
                waiting=int(sum(waiting)),
                kv_fraction=max(kv_use, default=None),
                tokens_per_s=_speed(before, self._last),
                server=self._server,
                restarts=restarts,
            )
            if (restarts or 0) > self._restarts:
                self._crash = crash
            self._restarts = restarts or 0  # fewer if the one who counts was replaced
            self._seen.append(use)
        return use

    def take(self) -> EngineUse | None:
        """Return the most of each since the last call; None if the server was not asked."""
        with self._lock:
            seen, self._seen = self._seen, []
            crash, self._crash = self._crash, None
            first, self._first = self._first, self._last
        if not seen:
            return None
        return EngineUse(
            running=max(use.running for use in seen),
            waiting=max(use.waiting for use in seen),
            kv_fraction=max((use.kv_fraction for use in seen if use.kv_fraction is not None), default=None),
            tokens_per_s=_speed(first, self._last),
            server=self._server,
            restarts=seen[-1].restarts,
            crash=crash,
        )


def _speed(before: tuple[float, float] | None, now: tuple[float, float] | None) -> float | None:
    """Return tokens per second; None if they are unknown, or the server was restarted in between."""
    if before is None or now is None or now[0] <= before[0] or now[1] < before[1]:
        return None
    return (now[1] - before[1]) / (now[0] - before[0])


class EngineWatch:
    """Watches the client that a run uses at present; the calls in flight end when the run leaves."""

    def __init__(
        self, engine: Engine, server: ServerFiles | str, progress: CallsProgress, spec: BackendSpec
    ) -> None:
        """Watch a server: the files of one that is ours, or the address of another."""
        self._engine, self._server, self._progress, self._spec = engine, server, progress, spec
        self._has_left = threading.Event()
        name = without_user(server) if isinstance(server, str) else str(server.log)
        state = self._state()
        self._meter = EngineMeter(name, state.restarts if state else 0)
        self.take_use = self._meter.take
        self._next_s = 0.0
        threading.Thread(target=_watch, args=(weakref.ref(self), self._has_left), daemon=True).start()

    def replace(self, engine: Engine) -> None:
        self._engine = engine
        if self._has_left.is_set():
            engine.end_calls()

    def close(self) -> None:
        """End calls that sample for training, now and from now on; safe to call twice."""
        self._has_left.set()
        self._engine.end_calls()

    def observe(self) -> None:
        if self._spec.is_leaving():
            self.close()
        now_s = time.monotonic()
        if self._progress.is_busy() and now_s >= self._next_s:
            self._next_s = now_s + METRICS_EVERY_S
            text = self._engine.read_metrics()
            state = self._state()
            crash = f"{state.problem}\n{state.last_lines}".strip() if state else ""
            restarts = state.restarts if state else None
            use = self._meter.observe(text, time.monotonic(), restarts, crash) if text else None
            if use is not None:
                self._spec.observe(use)

    def _state(self) -> ServerState | None:
        return None if isinstance(self._server, str) else self._server.read_state()


def _watch(watch: weakref.ref[EngineWatch], has_left: threading.Event) -> None:
    """Look now and then, until the run leaves or nobody holds the watch any more."""
    while not has_left.wait(POLL_S) and (held := watch()) is not None:
        held.observe()
        del held
