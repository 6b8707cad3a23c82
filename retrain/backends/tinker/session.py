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
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import tinker
from tinker.types import LossFnOutput

from retrain.backends import BackendSpec, StartProgress
from retrain.backends.tinker.billing import Update, UpdateOutcome, pass_forward, take_step
from retrain.backends.tinker.calls import ONCE, ApiCalls
from retrain.backends.tinker.connection import Connection
from retrain.backends.tinker.faults import FAULTS, describe, is_full, is_refusal, lacks_route
from retrain.backends.tinker.saved_states import Sampler, State, mismatch
from retrain.base.errors import ConfigError, RecordsError, RetrainError
from retrain.base.event_loop import in_thread
from retrain.records.layout import RunFiles
from retrain.records.spending import note_saved

T = TypeVar("T")

log = logging.getLogger(__name__)


class Session:
    """Training and sampling clients of the current policy. Use in one event loop."""

    def __init__(self, spec: BackendSpec, calls: ApiCalls) -> None:
        self._spec, self.calls = spec, calls
        self.connection = Connection(spec, calls)
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
                make = partial(training.save_weights_and_get_sampling_client, retry_config=ONCE)
                client = await self._certain(self.calls.once("sampler", make))
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
            outcome = await self._certain(take_step(self.calls, training, update))
            self.since.append(update)
            if update.is_last:
                self._sampler = None
            return outcome

        return await self._persist(f"update {self.version + 1}", attempt)

    async def forward(self, update: Update) -> Sequence[LossFnOutput]:
        """Return the API's output for each datum of an update, without a gradient."""

        async def attempt() -> Sequence[LossFnOutput]:
            training = await self._trained()
            return await self._certain(pass_forward(self.calls, training, update))

        return await self._persist(f"scoring for update {self.version + 1}", attempt)

    async def undo(self) -> None:
        async with self._lock:
            self.since.pop()
            self._forget()

    async def reset_optimizer(self) -> None:
        """Continue with the same weights, new moments and an update count of 0."""
        await self._restart((await self.save()).path, "resetting the optimizer")

    async def start_from(self, path: str) -> None:
        """Continue with a saved state's weights, and a state of its own from which it is rebuilt.

        A ConfigError if the API does not load it, or it does not fit the run.
        """
        try:
            await self._restart(path, f"starting from {path}")
        except RecordsError as error:
            why = f" ({describe(error.__cause__)})" if isinstance(error.__cause__, Exception) else ""
            raise ConfigError(f"[model].adapter: the Tinker API does not load {path}{why}") from error
        info = (await self._persist(f"loading {path}", self._trained)).get_info()
        if wrong := mismatch(info.model_data.model_name, info.lora_rank, self._spec):
            raise ConfigError(f"[model].adapter: {path} {wrong}")

    async def _restart(self, path: str, what: str) -> None:
        """Continue with a saved state's weights, without its optimizer and its number of updates."""

        async def attempt() -> None:
            if self._training is not None:
                self._forget()  # first: its model takes a place at the API
            training = await self._opened(path, with_optimizer=False)
            self._saved, self.since = State("", 0), []  # version 0 names the next saved state
            self._saved = State(await self._certain(self._save_state(training)), 0)
            self._training, self._sampler = training, None

        await self._persist(what, attempt)

    async def save(self) -> State:

        async def attempt() -> State:
            if self.since or not self._saved.path:
                path = await self._certain(self._save_state(await self._trained()))
                self._saved, self.since = State(path, self.version), []
            return self._saved

        return await self._persist(f"saving after update {self.version}", attempt)

    async def save_sampler(self, suffix: str) -> str:
        """Save the present weights for sampling; return their path."""

        async def attempt() -> str:
            training = await self._trained()
            return await self._certain(self._save_as(suffix, training.save_weights_for_sampler))

        return await self._persist(f"saving {suffix}", attempt)

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
        """Run an attempt with the lock held, as `persist` does."""

        async def alone() -> T:
            async with self._lock:
                return await attempt()

        return await self.persist(what, alone)

    async def persist(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run an attempt, again after each failure until the budget is used up; a lost session is renewed."""
        generation = self.generation

        async def noted() -> T:
            nonlocal generation
            generation = self.generation
            return await attempt()

        async def repair(lost: bool) -> None:
            if lost:
                await self.renew(generation)

        return await self.calls.persist(what, noted, repair)

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
            training = await self._opened(self._saved.path)
            if self.since:
                log.warning(
                    "repeating %d updates on %s", len(self.since), self._saved.path or "fresh weights"
                )
            for update in self.since:
                await take_step(self.calls, training, update)
            self._training = training
        return self._training

    async def _opened(self, path: str, *, with_optimizer: bool = True) -> tinker.TrainingClient:
        """Return a client of a saved state, or of fresh weights if its path is empty."""
        service, spec = await self.connection.service(), self._spec

        if not path:
            make = partial(
                service.create_lora_training_client, spec.model, rank=spec.lora_rank, seed=spec.seed
            )
        elif with_optimizer:
            make = partial(service.create_training_client_from_state_with_optimizer, path)
        else:
            make = partial(service.create_training_client_from_state, path)
        try:
            training = await self.calls.once("load" if path else "create", make)
            if self._full_since_s:
                self._show_wait("got room at the API after")
                self._full_since_s = 0.0
            return training
        except FAULTS as error:
            if is_full(error):
                self._full_since_s = self._full_since_s or time.monotonic()
                self._show_wait("waiting for room at the API")
                await self.connection.make_room()
            if is_refusal(error):
                raise self._refusal(error, path) from error
            raise

    def _show_wait(self, phase: str) -> None:
        self._spec.observe(StartProgress(phase, time.monotonic() - self._full_since_s))

    def _refusal(self, error: Exception, path: str) -> RetrainError:
        """Return what is wrong with the model or the saved state that the API refuses."""
        spec, said = self._spec, describe(error)
        if not path:
            what = f"refuses {spec.model!r} with lora_rank = {spec.lora_rank}"
            return ConfigError(f"[model].model: the Tinker API {what} ({said})")
        if lacks_route(error):
            return ConfigError(
                f"[model].base_url: the server cannot make a model from a saved state ({said}), which a run "
                f"that continues needs; {path} is not to blame: use another server, or start the run again"
            )
        return RecordsError(
            f"{path}: the API does not load this state ({said}); states expire after [backend.options]."
            "state_days. To continue from an earlier one, remove the run's newest checkpoints/step-*; to "
            "start it again, remove all of them"
        )

    async def _save_state(self, training: tinker.TrainingClient) -> str:
        return await self._save_as(f"{self.version:06d}", partial(training.save_state, overwrite=True))

    async def _save_as(self, suffix: str, save: Callable[..., Awaitable[Any]]) -> str:
        """Return the path of what is saved under a name of this run."""
        name = f"{re.sub('[^A-Za-z0-9_-]', '-', self._spec.run_name)}-{suffix}"
        answer = await self.calls.once("save", lambda: save(name, ttl_seconds=self.calls.options.state_ttl_s))
        if self._spec.notes is not None:
            note_saved(RunFiles(self._spec.notes), str(answer.path))
        return str(answer.path)

    def _forget(self) -> None:
        """Drop all clients; the next use rebuilds them. Needs the lock."""
        self.generation += 1
        self._training = self._sampler = None
        self.connection.drop()
