"""The Tinker API as a backend of plain functions: its policy's event loop runs in a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrain.backends import Backend, BackendInfo, BackendSpec, Optimization, Sampling, UpdateStats
from retrain.backends.engines import Ids
from retrain.backends.text import Schemas
from retrain.backends.tinker import TinkerOptions
from retrain.backends.tinker.policy import TinkerPolicy
from retrain.base.event_loop import EventLoopThread
from retrain.base.json_lines import Demonstration
from retrain.base.rollouts import CallForm, Group, Loss, NextTurn, Prompt, Rollout, TrainingSample


class TinkerBackend(Backend):
    """One run's policy at the API; callable from any thread, and sampling may overlap an update."""

    info = BackendInfo(parameters=0, remote=True, bills=True, extends=True)  # the API tells no number

    def __init__(self, spec: BackendSpec, options: TinkerOptions) -> None:
        """Open a session with the API."""
        self._loop = EventLoopThread()
        try:
            self._policy: TinkerPolicy = self._loop.wait_for(TinkerPolicy.opened(spec, options))
        except BaseException:
            self._loop.close()
            raise

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        return self._loop.wait_for(self._policy.sample(prompts, sampling))

    def update(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> UpdateStats:
        return self._loop.wait_for(self._policy.update(samples, loss, optimization))

    def save(self, directory: Path) -> None:
        self._loop.wait_for(self._policy.save(directory))

    def load(self, directory: Path) -> None:
        self._loop.wait_for(self._policy.load(directory))

    def close(self) -> None:
        try:
            self._loop.wait_for(self._policy.close())
        finally:
            self._loop.close()

    def extend(self, turns: Sequence[NextTurn], sampling: Sampling) -> list[Rollout | None]:
        return self._loop.wait_for(self._policy.extend(turns, sampling))

    def check_turns(self) -> None:
        self._loop.wait_for(self._policy.check_turns())

    def offer_tools(self, schemas: Schemas, *, is_extended: bool = True) -> CallForm:
        return self._loop.wait_for(self._policy.offer_tools(schemas, is_extended=is_extended))

    def call_form(self, schemas: Schemas) -> CallForm:
        return self._loop.wait_for(self._policy.call_form(schemas))

    def read(self, rollout: Rollout) -> Ids:
        return self._policy.read(rollout)

    def shown(self, tokens: Ids) -> str:
        return self._loop.wait_for(self._policy.shown(tokens))

    def written(self, demonstrations: Sequence[Demonstration]) -> list[Rollout]:
        return self._loop.wait_for(self._policy.written(demonstrations))

    def reset_optimizer(self) -> None:
        self._loop.wait_for(self._policy.reset_optimizer())

    def start_from(self, adapter: str, *, is_reference: bool) -> None:
        self._loop.wait_for(self._policy.start_from(adapter, is_reference=is_reference))

    def has_start(self) -> bool:
        return self._policy.has_start()

    def out_s(self) -> float:
        return self._policy.out_s()
