"""The API clients of one run, and how they are rebuilt after a failure.

A run's policy is the last state that the API saved (initially: weights from a seed) plus the updates
since. Both are kept, so that a new session can restore the same policy: it loads the state with its
optimizer and replays the updates. An update with unknown outcome is therefore taken exactly once.

A worker that is killed leaves a session behind, whose model takes a place on the server. Its id is in the
run's directory, so that the next attempt ends it before it makes a model of its own, and so does any run of
the campaign that finds no room.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar

import httpx
import numpy as np
import tinker
from tinker import APIStatusError, TensorData, TrainingClient, types
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from tinker.lib.internal_client_holder import InternalClientHolder

from retrain.backends import BackendSpec
from retrain.backends.progress import StartProgress
from retrain.backends.tinker.calls import (
    CONFLICT,
    FAULTS,
    ONCE,
    SAVE,
    UPDATE,
    ApiCalls,
    Fault,
    NameTakenError,
    Outages,
    backoff_s,
    classify,
    describe,
    is_full,
    is_refusal,
    is_taken,
    lacks_route,
    saves,
    status_of,
    status_told,
)
from retrain.backends.tinker.saved_states import Sampler, State, mismatch
from retrain.backends.tinker.server_facts import DIVISORS, SUM
from retrain.backends.tinker.wire import ApiLoss
from retrain.base.errors import ConfigError, InfrastructureError, RecordsError, RetrainError
from retrain.base.event_loop import in_thread
from retrain.base.locks import is_abandoned
from retrain.records.files import write_json
from retrain.records.layout import CampaignFiles, RunFiles, files_of_runs
from retrain.records.spending import Tokens, note_saved

T = TypeVar("T")

BYTES_PER_TOKEN = 24  # in a request: input, target, log-probability, advantage, ratio mask
PAYMENT_REQUIRED = 402
GOODBYE_S = 5.0  # timeout of closing; the API also ends a session without heartbeat
NOTE = "tinker-session.json"  # in the run's directory, while a session is open
SLOW_S = 2.0  # without a session, until the API is considered to be down
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0  # between polls for results that the API answers with errors
LEAVING: tuple[type[Exception], ...] = (*FAULTS, InfrastructureError)
log = logging.getLogger(__name__)


class Session:
    """Training and sampling clients of the current policy. Use in one event loop."""

    def __init__(self, spec: BackendSpec, calls: ApiCalls) -> None:
        self._spec, self.calls = spec, calls
        self.connection = Connection(spec, calls)
        self._lock = asyncio.Lock()  # held while clients are made or changed
        self._training: TrainingClient | None = None
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

    async def forward(self, update: Update) -> Sequence[types.LossFnOutput]:
        """Return the API's output for each datum of an update, without a gradient."""

        async def attempt() -> Sequence[types.LossFnOutput]:
            training, outputs = await self._trained(), []
            for part in update.parts_for(training):
                call = partial(training.forward, part, update.loss.name)
                billed = partial(self.calls.billed, Tokens(tokens_of(part)), call)
                outputs += (await self._certain(self.calls.once("forward", billed))).loss_fn_outputs
            return outputs

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

    async def sampler_of(self, path: str) -> str:
        """Save the weights of a state that was saved for training for sampling too; return their path."""

        async def attempt() -> str:
            other = await self._opened(path, with_optimizer=False)
            return await self._save_as("teacher", other.save_weights_for_sampler)

        return await self._persist(f"reading {path}", attempt)

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

    async def _trained(self) -> TrainingClient:
        """Return the training client, rebuilt if necessary. Needs the lock."""
        if self._training is None:
            training = await self._opened(self._saved.path)
            if self.since:
                start = self._saved.path or "fresh weights"
                log.warning("repeating %d updates on %s", len(self.since), start)
            for update in self.since:
                await take_step(self.calls, training, update)
            self._training = training
        return self._training

    async def _opened(self, path: str, *, with_optimizer: bool = True) -> TrainingClient:
        """Return a client of a saved state, or of fresh weights if its path is empty."""
        service, spec = await self.connection.service(), self._spec
        if not path:
            create = service.create_lora_training_client
            make = partial(create, spec.model, rank=spec.lora_rank, seed=spec.seed)
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
            return model_refusal(spec, error)
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

    async def _save_state(self, training: TrainingClient) -> str:
        return await self._save_as(f"{self.version:06d}", partial(training.save_state, overwrite=True))

    async def _save_as(self, suffix: str, save: Callable[..., Awaitable[Any]]) -> str:
        """Return the path of what is saved under a new name of this run.

        A name that the server has is one whose answer was lost, when the SDK sends the request again: the
        state is saved once more, under another.
        """
        stem = f"{re.sub('[^A-Za-z0-9_-]', '-', self._spec.run_name)}-{suffix}"

        async def saved() -> Any:
            name = f"{stem}-{secrets.token_hex(3)}"
            return await self.calls.once(SAVE, lambda: save(name, ttl_seconds=self.calls.options.state_ttl_s))

        try:
            answer = await saved()
        except FAULTS as error:
            if not is_taken(error):
                raise
            log.warning("saving %s under another name (%s)", suffix, describe(error))
            answer = await saved()
        if self._spec.notes is not None:
            note_saved(RunFiles(self._spec.notes), str(answer.path))
        return str(answer.path)

    def _forget(self) -> None:
        """Drop all clients; the next use rebuilds them. Needs the lock."""
        self.generation += 1
        self._training = self._sampler = None
        self.connection.drop()


def model_refusal(spec: BackendSpec, error: Exception) -> ConfigError:
    """Return the problem with a base model that the API refuses."""
    what = f"refuses {spec.model!r} with lora_rank = {spec.lora_rank}"
    return ConfigError(f"[model].model: the Tinker API {what} ({describe(error)})")


def sampled(prompt: int, response: types.SampleResponse) -> Tokens:
    """Return what a response is billed: reading the prompt once, but for what was cached, and each token."""
    hits = int(getattr(response, "prompt_cache_hit_tokens", 0))
    others = (len(response.sequences) - 1) * prompt
    return Tokens(prompt - hits, hits + others, sum(len(one.tokens) for one in response.sequences))


def tokens_of(data: Sequence[types.Datum]) -> int:
    """Return how many tokens a pass over data reads."""
    return sum(int(datum.model_input.length) for datum in data)


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """The data and settings of one optimizer step."""

    data: list[types.Datum]
    loss: ApiLoss
    adam: types.AdamParams
    is_last: bool = True  # before it, sampling continues with the earlier policy

    def parts_for(self, training: TrainingClient) -> list[list[types.Datum]]:
        """Return the data in parts that the server takes in one request."""
        limits = training.holder.get_client_config()
        most, most_bytes = limits.fwdbwd_max_chunk_len, limits.fwdbwd_max_chunk_bytes_count
        parts: list[list[types.Datum]] = [[]]
        size = 0
        for datum in self.data:
            datum_bytes = BYTES_PER_TOKEN * tokens_of([datum])
            if parts[-1] and (len(parts[-1]) == most or size + datum_bytes > most_bytes):
                parts.append([])
                size = 0
            parts[-1].append(datum)
            size += datum_bytes
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class UpdateOutcome:
    """The API's response to an update."""

    outputs: Sequence[types.LossFnOutput]  # one per datum
    metrics: dict[str, float]

    @classmethod
    def of(
        cls, passes: Sequence[types.ForwardBackwardOutput], step: types.OptimStepResponse
    ) -> UpdateOutcome:
        """Join the responses to the parts; sums are added up, and one that a part lacks is not known."""
        outputs = [output for answer in passes for output in answer.loss_fn_outputs]
        reported = [answer.metrics or {} for answer in passes]  # some servers report none
        metrics = {name: value for name, value in reported[-1].items() if not name.endswith(":sum")}
        in_all = set(reported[-1]).intersection(*reported) - metrics.keys()
        metrics |= {name: sum(one[name] for one in reported) for name in in_all}
        return cls(outputs, metrics | (step.metrics or {}))


def multiplied(part: list[types.Datum], loss: ApiLoss, divisor: str) -> list[types.Datum]:
    """Return the data of one request, multiplied by what the server divides the loss by."""
    if divisor == SUM:
        return part
    name = "weights" if loss.is_supervised else "advantages"
    weights = [datum.loss_fn_inputs[name].to_numpy() for datum in part]
    scaled = [
        TensorData.from_numpy((factor * each).astype(np.float32))
        for factor, each in zip(DIVISORS[divisor](weights), weights, strict=True)
    ]
    return [
        types.Datum(model_input=datum.model_input, loss_fn_inputs={**datum.loss_fn_inputs, name: tensor})
        for datum, tensor in zip(part, scaled, strict=True)
    ]


async def take_step(calls: ApiCalls, training: TrainingClient, update: Update) -> UpdateOutcome:
    """Take an optimizer step."""

    def differentiate(part: list[types.Datum]) -> Awaitable[types.ForwardBackwardOutput]:
        part = multiplied(part, update.loss, calls.server.divisor(update.loss.name))
        call = partial(training.forward_backward, part, update.loss.name, update.loss.config or None)
        return calls.billed(Tokens(train=tokens_of(part)), call)

    *before, last = update.parts_for(training)
    passes = [await calls.once(UPDATE, partial(differentiate, part)) for part in before]
    end, step = await calls.pair(
        UPDATE, lambda: differentiate(last), lambda: training.optim_step(update.adam)
    )
    return UpdateOutcome.of([*passes, end], step)


class Connection:
    """One session with the API at a time."""

    def __init__(self, spec: BackendSpec, calls: ApiCalls) -> None:
        self._spec, self.calls = spec, calls
        self._service: tinker.ServiceClient | None = None
        self._farewells: set[asyncio.Future[None]] = set()
        self._note = None if spec.notes is None else spec.notes / NOTE
        self._abandoned = "" if self._note is None else self._left_by(self._note)  # by an earlier attempt
        self._ended: set[str] = set()  # sessions of other runs

    async def try_out(self) -> None:
        """Open a session; a ConfigError if the key or the address is rejected."""
        try:
            await self.service()
        except FAULTS as error:
            where = self._spec.base_url or "its default address"
            if classify(error) in (Fault.REFUSED, Fault.WRONG):
                raise ConfigError(
                    f"the Tinker API at {where} refuses the session ({describe(error)}); "
                    "check the environment's TINKER_API_KEY"
                ) from error
            if status_of(error) == PAYMENT_REQUIRED:
                raise InfrastructureError(
                    f"the Tinker API at {where} waits for its bill to be paid ({describe(error)}); "
                    "pay it, then continue with `retrain resume`"
                ) from error
            raise InfrastructureError(
                f"the Tinker API at {where} cannot be reached ({describe(error)}); "
                "check [model].base_url and the network"
            ) from error

    async def service(self) -> tinker.ServiceClient:
        """Return the service client with an open session. May fail like any call."""
        if self._service is None:
            service = tinker.ServiceClient(
                user_metadata={"run": self._spec.run_name}, base_url=self._spec.base_url or None
            )

            async def connect() -> None:
                outages, loop = self.calls.outages, asyncio.get_running_loop()
                late = loop.call_later(SLOW_S, outages.failed, "it opens no session", time.monotonic())
                try:
                    async with asyncio.timeout(self.calls.options.connect_timeout_s):
                        with outages.request(is_poll=False), status_told():
                            # in a thread, because the SDK blocks until the session is open
                            await in_thread(lambda: service.holder, unwanted=lambda holder: holder.close())
                finally:
                    late.cancel()

            await self.calls.once("session", connect)
            _watch_requests(service.holder, self.calls.outages)
            if self._note is not None:
                if session := self._abandoned:  # of an attempt of this run that was killed
                    self._abandoned = ""
                    await self._goodbye(partial(_finish, service.holder, session))
                session_facts = {"session": service.holder.get_session_id(), **self._where(self._note)}
                write_json(self._note, session_facts, durable=False)
            self._service = service
        return self._service

    def drop(self) -> None:
        """Drop the session; the next use opens a new one."""
        service, self._service = self._service, None
        if service is not None:
            farewell = asyncio.ensure_future(self._end(service, "errored", frozenset(self.calls.in_flight)))
            self._farewells.add(farewell)
            farewell.add_done_callback(self._farewells.discard)

    async def close(self) -> None:
        """End the session and all dropped ones."""
        service, self._service = self._service, None
        endings = [*self._farewells]
        if service is not None:
            endings.append(asyncio.ensure_future(self._end(service, "success")))
        await asyncio.gather(*endings)
        if self._note is not None:
            with contextlib.suppress(OSError):  # the session that it names has ended
                self._note.unlink()

    async def make_room(self) -> None:
        """End the sessions that killed workers of this campaign left at the API."""
        if self._note is None or self._spec.campaign is None:
            return
        holder, mine = (await self.service()).holder, self._note.parent
        for run in files_of_runs(CampaignFiles(self._spec.campaign)).values():
            session = self._left_by(run.directory / NOTE)
            if run.directory == mine or not session or session in self._ended:
                continue
            if await in_thread(partial(is_abandoned, run.lock)):
                log.warning("ending the session that a killed worker of %s left", run.directory.name)
                await self._goodbye(partial(_finish, holder, session))
                self._ended.add(session)

    async def _end(
        self,
        service: tinker.ServiceClient,
        status: Literal["success", "errored"],
        calls: Collection[asyncio.Event] = (),
    ) -> None:
        """Close a session after all of its calls have ended, because closing makes calls hang."""
        for ended in calls:
            await ended.wait()  # each has a timeout of its own
        holder = service.holder
        try:
            await self._goodbye(lambda: service.close(status))
        finally:
            holder.close()  # ends heartbeat and connections, even without a permit for the closing call

    async def _goodbye(self, finish: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self.calls.once("goodbye", finish)
        except LEAVING as error:
            log.info("a session could not be closed: %s", describe(error))

    def _where(self, note: Path) -> dict[str, str]:
        return {"directory": str(note.parent.resolve()), "base_url": self._spec.base_url}

    def _left_by(self, note: Path) -> str:
        """Return the session that a note tells of; "" if it is none, damaged, or copied with another run."""
        try:
            note_facts = json.loads(note.read_text(encoding="utf-8"))
            return str(note_facts["session"]) if note_facts.items() >= self._where(note).items() else ""
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return ""


def _finish(holder: InternalClientHolder, session: str) -> Awaitable[None]:
    """End another session with the connections of this one."""

    async def post() -> None:
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            body = {"reason": {"type": "interrupted"}, "detail": "its worker ended without closing it"}
            await client.post(f"/api/v1/sessions/{session}/finish", body=body, cast_to=NoneType)

    done: Awaitable[None] = holder.run_coroutine_threadsafe(post())
    return done


def _watch_requests(holder: InternalClientHolder, outages: Outages) -> None:
    """Note what the API answers, and pause between polls for results while it fails: the SDK does neither."""
    sdk_client, failures = holder.aclient, 0

    async def note_request(request: httpx.Request) -> None:
        outages.sending(request.url.path)

    async def note(response: httpx.Response) -> None:
        outages.answered(response.request.url.path, response.status_code)

    async def pause(response: httpx.Response) -> None:
        nonlocal failures
        if response.status_code == 200 and "json" in response.headers.get("content-type", ""):
            await response.aread()  # some servers say so that they have paused a call, and not with 408
            with contextlib.suppress(ValueError):
                outages.said(response.json())
        failures = failures + 1 if response.status_code >= 500 else 0
        if failures:
            await asyncio.sleep(backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S))

    @contextlib.contextmanager
    def aclient(kind: ClientConnectionPoolType) -> Iterator[tinker.AsyncTinker]:
        is_poll = kind is ClientConnectionPoolType.RETRIEVE_PROMISE
        try:
            with outages.request(is_poll=is_poll), sdk_client(kind) as client:
                hooks = client._client.event_hooks  # httpx's: there is no other place between polls
                if note not in hooks["response"]:
                    hooks["response"] += [note, pause] if is_poll else [note]
                    hooks["request"].append(note_request)
                yield client
        except APIStatusError as error:
            if error.status_code == CONFLICT and saves():
                raise NameTakenError(str(error)) from error
            raise

    holder.aclient = aclient
