"""The API clients of one run, and how they are rebuilt after a failure.

A run's policy is the last state that the API saved (initially: weights from a seed) plus the updates
since. Both are kept, so that a new session can restore the same policy: it loads the state with its
optimizer and replays the updates. An update with unknown outcome is therefore taken exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import tinker
from tinker import types

from retrain.backends import BackendSpec, StartProgress
from retrain.backends.tinker import DAY_S, TinkerOptions
from retrain.backends.tinker.billing import billed, scored, trained
from retrain.backends.tinker.calls import Calls
from retrain.backends.tinker.connection import Connection
from retrain.backends.tinker.faults import FAULTS, describe, is_full, is_refusal, lacks_route
from retrain.backends.tinker.state import Sampler, State, Update
from retrain.backends.tinker.wire import UpdateOutcome
from retrain.errors import ConfigError, RecordsError, RetrainError
from retrain.event_loop import in_thread
from retrain.records.layout import RunFiles
from retrain.records.saved_states import note_saved

T = TypeVar("T")

log = logging.getLogger(__name__)


class Session:
    """Training and sampling clients of the current policy. Use in one event loop."""

    def __init__(self, spec: BackendSpec, options: TinkerOptions, calls: Calls) -> None:
        self._spec = spec
        self._options = options
        self._calls = calls
        self.connection = Connection(spec, options, calls)
        self._lock = asyncio.Lock()  # held while clients are made or changed
        self._training: tinker.TrainingClient | None = None
        self._sampler: Sampler | None = None
        self._saved = State("", 0)
        self.since: list[Update] = []  # updates after `_saved`, replayed if the session is lost
        self.generation = 0  # sessions dropped so far
        self._full_since_s = 0.0  # when the API began to have no room; 0: it has

    @property
    def version(self) -> int:
        """Number of optimizer updates of the policy."""
        return self._saved.version + len(self.since)

    async def open(self) -> None:
        async with self._lock:
            await self.connection.try_out()

    async def tokenizer(self) -> Any:
        """Return the tokenizer that the API names for the model."""
        training = await self._persist("loading the model", self._trained)
        return await in_thread(training.get_tokenizer)

    async def sampler(self) -> Sampler:
        """Return a sampler of the current policy. May fail like any call.

        During an update this is the sampler of the previous policy.
        """
        if self._sampler is not None:
            return self._sampler
        async with self._lock:
            if self._sampler is None:
                training = await self._trained()
                client = await self._certain(
                    self._calls.once("sampler", training.save_weights_and_get_sampling_client)
                )
                self._sampler = Sampler(client, self.version)
            return self._sampler

    async def service(self) -> tinker.ServiceClient:
        """Return the service client with an open session. May fail like any call."""
        async with self._lock:
            return await self.connection.service()

    async def update(self, update: Update) -> UpdateOutcome:
        """Take one optimizer step, exactly once."""

        async def attempt() -> UpdateOutcome:
            training = await self._trained()
            outcome = await self._certain(self._step(training, update))
            self.since.append(update)
            if update.is_last:
                self._sampler = None
            return outcome

        return await self._persist(f"update {self.version + 1}", attempt)

    async def forward(self, update: Update) -> Sequence[Mapping[str, Any]]:
        """Return the API's output for each datum of an update, without a gradient."""

        async def attempt() -> Sequence[Mapping[str, Any]]:
            training = await self._trained()
            return await self._certain(self._forward(training, update))

        return await self._persist(f"scoring for update {self.version + 1}", attempt)

    async def undo(self) -> None:
        async with self._lock:
            self.since.pop()
            self._forget()

    async def reset_optimizer(self) -> None:
        """Continue with the same weights, new moments and an update count of 0."""
        saved = await self.save()

        async def attempt() -> None:
            service = await self.connection.service()
            training = await self._calls.once(
                "load", lambda: service.create_training_client_from_state(saved.path)
            )
            self._saved, self.since = State("", 0), []  # version 0 names the next saved state
            self._saved = State(await self._certain(self._save_state(training)), 0)
            self._training, self._sampler = training, None

        await self._persist("resetting the optimizer", attempt)

    async def save(self) -> State:

        async def attempt() -> State:
            if self.since or not self._saved.path:
                path = await self._certain(self._save_state(await self._trained()))
                self._saved, self.since = State(path, self.version), []
            return self._saved

        return await self._persist(f"saving after update {self.version}", attempt)

    async def resume(self, state: State) -> None:
        """Continue from a saved state; one that the API no longer has is a RecordsError."""
        async with self._lock:
            self._saved, self.since = state, []
            if self._training is not None:
                self._forget()
        await self._persist(f"loading {state.path}", self._trained)

    async def renew_sampler(self, suspect: Sampler) -> None:
        """Drop a sampler unless it was already replaced; the next use makes a new one."""
        async with self._lock:
            if suspect is self._sampler:
                self._sampler = None

    async def renew(self, generation: int) -> None:
        """Drop the session unless this generation's was already dropped; the next use opens a new one."""
        async with self._lock:
            if generation == self.generation:
                self._forget()

    async def close(self) -> None:
        """End the session; unsaved state is lost."""
        await self.connection.close()

    async def _persist(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run an attempt with the lock held, again after each failure until the budget is used up."""
        generation = self.generation

        async def noted() -> T:
            nonlocal generation
            generation = self.generation
            async with self._lock:
                return await attempt()

        async def repair(lost: bool) -> None:
            if lost:
                await self.renew(generation)

        return await self._calls.persist(what, noted, repair)

    async def _certain(self, call: Awaitable[T]) -> T:
        """Await an ordered call; after a failure its effect is unknown, so rebuild the training client."""
        try:
            return await call
        except BaseException:
            self._forget()
            raise

    async def _trained(self) -> tinker.TrainingClient:
        """Return the training client, rebuilt if necessary. Needs the lock."""
        if self._training is None:
            training = await self._new_training()
            if self.since:
                log.warning(
                    "repeating %d updates on %s", len(self.since), self._saved.path or "fresh weights"
                )
            for update in self.since:
                await self._step(training, update)
            self._training = training
        return self._training

    async def _new_training(self) -> tinker.TrainingClient:
        """Return a client of the last saved state, or of fresh weights."""
        service, spec, path = await self.connection.service(), self._spec, self._saved.path

        def make() -> Awaitable[tinker.TrainingClient]:
            client: Awaitable[tinker.TrainingClient] = (
                service.create_training_client_from_state_with_optimizer(path)
                if path
                else service.create_lora_training_client(spec.model, rank=spec.lora_rank, seed=spec.seed)
            )
            return client

        try:
            training = await self._calls.once("load" if path else "create", make)
            if self._full_since_s:
                self._show_wait("got room at the API after")
                self._full_since_s = 0.0
            return training
        except FAULTS as error:
            if is_full(error):
                self._full_since_s = self._full_since_s or time.monotonic()
                self._show_wait("waiting for room at the API")
            if is_refusal(error):
                raise self._refusal(error) from error
            raise

    def _show_wait(self, phase: str) -> None:
        self._spec.observe(StartProgress(phase, time.monotonic() - self._full_since_s))

    def _refusal(self, error: Exception) -> RetrainError:
        """Return what is wrong with the model or the saved state that the API refuses."""
        spec, path, said = self._spec, self._saved.path, describe(error)
        if not path:
            what = f"refuses {spec.model!r} with lora_rank = {spec.lora_rank}"
            return ConfigError(f"[model].model: the Tinker API {what} ({said})")
        if lacks_route(error):
            return ConfigError(
                f"[model].base_url: the server cannot make a model from a saved state ({said}), which a run "
                f"that continues needs; {path} is not to blame: use another server, or start the run again"
            )
        return RecordsError(
            f"{path}: the API does not load this checkpoint ({said}); "
            "use an earlier one, or start the run again"
        )

    async def _save_state(self, training: tinker.TrainingClient) -> str:
        ttl_s = int(self._options.state_days * DAY_S) or None
        name = f"{re.sub('[^A-Za-z0-9_-]', '-', self._spec.run_name)}-{self.version:06d}"
        answer: types.SaveWeightsResponse = await self._calls.once(
            "save", lambda: training.save_state(name, ttl_seconds=ttl_s, overwrite=True)
        )
        if self._spec.notes is not None:
            note_saved(RunFiles(self._spec.notes), str(answer.path))
        return str(answer.path)

    async def _forward(self, training: tinker.TrainingClient, update: Update) -> Sequence[Mapping[str, Any]]:
        outputs: list[Mapping[str, Any]] = []
        for part in update.parts_for(training):
            passed = await self._calls.once("forward", partial(self._scored, training, part, update))
            outputs += passed.loss_fn_outputs
        return outputs

    def _scored(
        self, training: tinker.TrainingClient, part: list[types.Datum], update: Update
    ) -> Awaitable[types.ForwardBackwardOutput]:
        def call() -> Awaitable[types.ForwardBackwardOutput]:
            future: Awaitable[types.ForwardBackwardOutput] = training.forward(part, update.loss.name)
            return future

        tokens = scored(part)
        return billed(self._spec.meter, tokens, call, lambda _: tokens)

    async def _step(self, training: tinker.TrainingClient, update: Update) -> UpdateOutcome:
        *before, last = update.parts_for(training)

        def differentiate(part: list[types.Datum]) -> Awaitable[types.ForwardBackwardOutput]:
            def call() -> Awaitable[types.ForwardBackwardOutput]:
                future: Awaitable[types.ForwardBackwardOutput] = training.forward_backward(
                    part, update.loss.name, update.loss.config or None
                )
                return future

            tokens = trained(part)
            return billed(self._spec.meter, tokens, call, lambda _: tokens)

        passes = [await self._calls.once("update", partial(differentiate, part)) for part in before]
        end, step = await self._calls.pair(
            "update", lambda: differentiate(last), lambda: training.optim_step(update.adam)
        )
        return UpdateOutcome.of([*passes, end], step)

    def _forget(self) -> None:
        """Drop all clients; the next use rebuilds them. Needs the lock."""
        self.generation += 1
        self._training = self._sampler = None
        self.connection.drop()
