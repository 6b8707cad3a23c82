"""The API's objects of one run, and how they are rebuilt when they are lost.

A run's policy is the last state that the API saved (at first: fresh weights from a seed) followed by
the updates taken since. Both are remembered, so that whatever happens to the session, a new one is
brought to the same policy: the state is loaded with its optimizer and the updates are repeated. An
update whose outcome is unknown is thus taken exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import tinker
from tinker import types

from retrain.backends.tinker.calls import Calls
from retrain.backends.tinker.connection import Connection, result
from retrain.backends.tinker.faults import FAULTS, Fault, classify, describe
from retrain.backends.tinker.losses import ApiLoss
from retrain.backends.tinker.options import DAY_S, TinkerOptions
from retrain.backends.tinker.policy import Model, Outcome, Sampler, State, Update
from retrain.blocking import in_thread
from retrain.errors import ConfigError, RecordsError

T = TypeVar("T")

log = logging.getLogger(__name__)


class Session:
    """Training and sampling clients of the current policy. For one event loop."""

    def __init__(self, model: Model, options: TinkerOptions, calls: Calls) -> None:
        self._model = model
        self._options = options
        self._calls = calls
        self._connection = Connection(model, options, calls)
        self._lock = asyncio.Lock()  # over everything that makes or changes clients
        self._training: tinker.TrainingClient | None = None
        self._sampler: Sampler | None = None
        self._saved = State("", 0)
        self._since: list[Update] = []  # taken after `_saved`
        self.generation = 0  # sessions dropped so far

    @property
    def version(self) -> int:
        """Optimizer updates that the policy has seen."""
        return self._saved.version + len(self._since)

    @property
    def unsaved(self) -> int:
        """Updates that a lost session would cost the time to repeat."""
        return len(self._since)

    async def open(self) -> None:
        """Open a session, which costs nothing.

        Raises:
            ConfigError: the key or the address is refused.
            InfrastructureError: the API cannot be reached.
        """
        async with self._lock:
            await self._connection.try_out()

    async def tokenizer(self) -> Any:
        """Return the tokenizer that the API names for the model."""
        training = await self._persist("loading the model", self._locked_training)
        return await in_thread(training.get_tokenizer)

    async def sampler(self) -> Sampler:
        """Return a sampler of the current policy. May fail as calls do.

        During an update this is the sampler of the policy before it.
        """
        if self._sampler is not None:
            return self._sampler
        async with self._lock:
            if self._sampler is None:
                training = await self._trained()
                client = await self._certain(
                    self._calls.once(
                        "sampler", lambda: result(training.save_weights_and_get_sampling_client())
                    )
                )
                self._sampler = Sampler(client, self.version)
            return self._sampler

    async def update(self, data: list[types.Datum], loss: ApiLoss, adam: types.AdamParams) -> Outcome:
        """Take one optimizer step, exactly once."""
        update = Update(data, loss, adam)

        async def attempt() -> Outcome:
            async with self._lock:
                training = await self._trained()
                outcome = await self._certain(self._step(training, update))
                self._since.append(update)
                self._sampler = None
                return outcome

        return await self._persist(f"update {self.version + 1}", attempt)

    async def undo(self) -> None:
        """Undo the last update: the policy is as before it."""
        async with self._lock:
            self._since.pop()
            self._forget()

    async def reset_optimizer(self) -> None:
        """Continue with the same weights, fresh moments and no updates seen."""
        saved = await self.save()

        async def attempt() -> None:
            async with self._lock:
                service = await self._connection.service()
                training = await self._calls.once(
                    "load", lambda: result(service.create_training_client_from_state(saved.path))
                )
                self._saved, self._since = State("", 0), []  # names the state that is saved next
                self._saved = State(await self._certain(self._save_state(training)), 0)
                self._training, self._sampler = training, None

        await self._persist("resetting the optimizer", attempt)

    async def save(self) -> State:
        """Have the API save weights and optimizer."""

        async def attempt() -> State:
            async with self._lock:
                if self._since or not self._saved.path:
                    training = await self._trained()
                    path = await self._certain(self._save_state(training))
                    self._saved, self._since = State(path, self.version), []
                return self._saved

        return await self._persist(f"saving after update {self.version}", attempt)

    async def resume(self, state: State) -> None:
        """Continue from a saved state.

        Raises:
            RecordsError: the API does not have it any more.
        """
        async with self._lock:
            self._saved, self._since = state, []
            self._forget()
        await self._persist(f"loading {state.path}", self._locked_training)

    async def renew_sampler(self, suspect: Sampler) -> None:
        """Drop a sampler, unless it was replaced already; the next use makes another."""
        async with self._lock:
            if suspect is self._sampler:
                self._sampler = None

    async def renew(self, generation: int) -> None:
        """Drop the session, unless this generation's was dropped already; the next use opens another."""
        async with self._lock:
            if generation == self.generation:
                self._forget()

    async def close(self) -> None:
        """End the session; the API forgets what was not saved."""
        await self._connection.close()

    async def _persist(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        generation = self.generation

        async def noted() -> T:
            nonlocal generation
            generation = self.generation
            return await attempt()

        async def repair(lost: bool) -> None:
            if lost:
                await self.renew(generation)

        return await self._calls.persist(what, noted, repair)

    async def _certain(self, call: Awaitable[T]) -> T:
        """Await a call that the API takes in order; if it fails, its effect is unknown: start over."""
        try:
            return await call
        except BaseException:
            self._forget()
            raise

    async def _locked_training(self) -> tinker.TrainingClient:
        async with self._lock:
            return await self._trained()

    async def _trained(self) -> tinker.TrainingClient:
        """Return the training client, made again if necessary. Needs the lock."""
        if self._training is None:
            training = await self._load() if self._saved.path else await self._create()
            if self._since:
                log.warning(
                    "repeating %d updates on %s", len(self._since), self._saved.path or "fresh weights"
                )
            for update in self._since:
                await self._step(training, update)
            self._training = training
        return self._training

    async def _create(self) -> tinker.TrainingClient:
        service = await self._connection.service()
        model = self._model
        try:
            return await self._calls.once(
                "create",
                lambda: result(
                    service.create_lora_training_client(model.name, rank=model.rank, seed=model.seed)
                ),
            )
        except FAULTS as error:
            if classify(error) is Fault.WRONG:
                raise ConfigError(
                    f"[model].model: the Tinker API refuses {model.name!r} with lora_rank = {model.rank} "
                    f"({describe(error)})"
                ) from error
            raise

    async def _load(self) -> tinker.TrainingClient:
        service = await self._connection.service()
        try:
            return await self._calls.once(
                "load",
                lambda: result(service.create_training_client_from_state_with_optimizer(self._saved.path)),
            )
        except FAULTS as error:
            if classify(error) is Fault.WRONG or isinstance(error, tinker.NotFoundError):
                raise RecordsError(
                    f"{self._saved.path}: the API does not load this checkpoint ({describe(error)}); "
                    "use an earlier one, or start the run again"
                ) from error
            raise

    async def _save_state(self, training: tinker.TrainingClient) -> str:
        ttl_s = int(self._options.state_days * DAY_S) or None
        name = f"{re.sub('[^A-Za-z0-9._-]', '-', self._model.run)}-{self.version:06d}"
        answer: types.SaveWeightsResponse = await self._calls.once(
            "save", lambda: result(training.save_state(name, ttl_seconds=ttl_s, overwrite=True))
        )
        return str(answer.path)

    async def _step(self, training: tinker.TrainingClient, update: Update) -> Outcome:
        limits = training.holder.get_client_config()
        *before, last = update.parts(limits.fwdbwd_max_chunk_len, limits.fwdbwd_max_chunk_bytes_count)

        def differentiate(part: list[types.Datum]) -> Awaitable[types.ForwardBackwardOutput]:
            return result(training.forward_backward(part, update.loss.name, update.loss.config or None))

        passes = [await self._calls.once("update", partial(differentiate, part)) for part in before]
        end, step = await self._calls.pair(
            "update", lambda: differentiate(last), lambda: result(training.optim_step(update.adam))
        )
        return Outcome.of([*passes, end], step)

    def _forget(self) -> None:
        """Drop all clients; the next use makes them again. Needs the lock."""
        self.generation += 1
        self._training = self._sampler = None
        self._connection.drop()
