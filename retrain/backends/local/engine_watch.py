"""Watches a sampling server: its metrics, and whether it samples from the policy that is trained.

The calls in flight end when the run leaves. The policy is compared by the log-probabilities of a few tokens.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from retrain.backends import BackendSpec
from retrain.engines import Drawn, Ids
from retrain.engines.metrics import EngineMeter
from retrain.engines.openai import Engine
from retrain.engines.shared_server import ServerFiles, ServerState
from retrain.errors import RunFailedError
from retrain.http_client import without_user
from retrain.rollouts import Prompt, Rollout, TrainingSample

LOOK_S = 0.2  # between checks for a stop
METRICS_EVERY_S = 2.0
TOLERANCE_NATS = 0.2  # mean over tokens; differences from kernels and bfloat16 are ten times smaller
NOISE_NATS = 0.02  # smaller differences are noise
CHECKED_TOKENS = 256


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


def reject_other_policy(nats_apart: Callable[[float], float], temperature: float) -> None:
    """Raise RunFailedError if a server's log-probabilities, sampled at a temperature, are not ours.

    `nats_apart` returns their mean distance from ours at a temperature.
    """
    apart = nats_apart(temperature)
    if apart > NOISE_NATS and nats_apart(1.0) < apart / 2:
        raise RunFailedError(
            "the sampling server reports log-probabilities before the temperature is applied; start it "
            "with processed ones (vLLM: --logprobs-mode processed_logprobs)"
        )
    if apart > TOLERANCE_NATS:
        raise RunFailedError(
            f"the sampling server's log-probabilities are {apart:.2f} nats per token from "
            "this model's; check that it serves the same weights and applies the adapters"
        )


def reject_unknown(drawn: Sequence[Drawn], known: int) -> None:
    """Raise RunFailedError for tokens without an embedding: on a GPU they would crash the process."""
    if unknown := [token for one in drawn for token in one.tokens if not 0 <= token < known]:
        raise RunFailedError(
            f"the sampling server drew token {unknown[0]}, and this model knows {known}; "
            "check that it serves the same model"
        )


def first_tokens(
    prompts: Sequence[Ids], drawn: Sequence[Drawn]
) -> tuple[list[TrainingSample], dict[str, Ids]]:
    """Return enough completions for the comparison, and their prompts by text."""
    samples: list[TrainingSample] = []
    texts: dict[str, Ids] = {}
    tokens = 0
    for number, (ids, one) in enumerate(zip(prompts, drawn, strict=True)):
        rollout = Rollout(Prompt(number, str(number), ""), "", one.tokens, one.logprobs, (), not one.ended)
        samples.append(TrainingSample(rollout, np.zeros(len(one.tokens)), 1.0))
        texts[str(number)] = ids
        tokens += len(one.tokens)
        if tokens >= CHECKED_TOKENS:
            break
    return samples, texts
