"""Asks a server how it behaves where servers differ in silence, by a training run of a few tokens.

It judges by what a server does, not by what it says: by the length of a gradient where the server tells one,
and else by how log-probabilities move. The model of the probe is its own, and gone before that of the run is
made, so that a server with room for one model can be asked.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar

import filelock
import numpy as np
from tinker import SamplingClient, TensorData, TrainingClient, types
from tinker._client import AsyncTinker
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

from retrain.backends import BackendSpec
from retrain.backends.metering import tally
from retrain.backends.progress import StartProgress
from retrain.backends.tinker import TinkerOptions
from retrain.backends.tinker.calls import (
    FAULTS,
    ONCE,
    ApiCalls,
    Fault,
    classify,
    describe,
    is_full,
    is_refusal,
    lacks_route,
)
from retrain.backends.tinker.saved_states import ANSWER_S, EXPORT_LIVES_S, ask
from retrain.backends.tinker.server_facts import (
    COST_TOLD,
    DIVISORS,
    OTHER,
    UNKNOWN,
    ServerFacts,
    Weights,
    address_of,
    file_of,
    identity,
    store,
    stored,
)
from retrain.backends.tinker.session import Connection, model_refusal
from retrain.backends.tinker.wire import GAP_NATS, Name, gradient_norm
from retrain.base.event_loop import in_thread
from retrain.base.rollouts import Floats
from retrain.config.schema import Config
from retrain.records.spending import Tokens

T = TypeVar("T")
log = logging.getLogger(__name__)

TOKENS = (1, 2, 3, 1, 2, 3, 1, 2)  # that every vocabulary has
SHORT, LONG = 3, 7  # positions of the two datums whose gradients are compared
PLACE, FURTHER = 2, 5  # a position with a weight in both, and another of the longer one
FORMS: tuple[Name, ...] = ("cross_entropy", "importance_sampling")
SMALL = -0.01  # a weight whose gradient tells a sum from an average of weights
FAINT = 1e-3  # a weight that counts as one and adds next to nothing
NEAR = 0.05  # relative difference between gradients that are equal but for rounding
RATES = (1e-4, 1e-3, 1e-2, 1e-1)  # tried until a step moves something
MOVED_NATS = 0.1  # a step moved the log-probability of a position; rounding stays below
STILL = 0.2  # of a step: less is no step
NO_NORM, NO_EPS = 1e-12, 1e-6  # a gradient that is cut to this length moves nothing, with this eps
WAIT_S = 0.2  # between looks at whether another worker's probe is over
SAVED = "retrain-probe"
Adam = partial(types.AdamParams, beta1=0.0, beta2=0.0, eps=1e-12)  # without memory of earlier steps


def ask_server(config: Config, options: TinkerOptions) -> ServerFacts:
    """Ask a run's server, whatever is known of it, and keep the answers."""
    model = config.model
    spec = BackendSpec(seed=0, model=model.model, base_url=model.base_url, lora_rank=model.lora_rank)

    async def asked() -> ServerFacts:
        calls = ApiCalls(spec, options)
        connection = Connection(spec, calls)
        await connection.try_out()
        return await facts_of(spec, calls, connection, is_anew=True)

    return asyncio.run(asked())


async def facts_of(
    spec: BackendSpec, calls: ApiCalls, connection: Connection, *, is_anew: bool = False
) -> ServerFacts:
    """Return what a server of another maker does; ask it unless that is known, once for all who wait.

    Ends the connection's session if it asks. `is_anew`: ask even if it is known.
    """
    wanted = await in_thread(partial(identity, address_of(spec.base_url), spec.model))
    if not is_anew and (facts := stored(wanted)):
        return facts
    began_s = time.monotonic()
    lock = filelock.FileLock(f"{file_of(wanted.url, wanted.model)}.lock", mode=0o600, thread_local=False)
    while True:
        try:
            lock.acquire(timeout=0)
            break
        except filelock.Timeout:
            waited_s = time.monotonic() - began_s
            spec.observe(StartProgress("waiting for another worker's probe of the server", waited_s))
            await asyncio.sleep(WAIT_S)
    try:
        if not is_anew and (facts := stored(wanted)):
            return facts
        log.info("asking %s how it behaves with %s; %s", wanted.url, wanted.model, COST_TOLD)
        facts = await _asked(spec, calls, connection, wanted)
        store(facts)
        return facts
    finally:
        lock.release()


async def _asked(
    spec: BackendSpec, calls: ApiCalls, connection: Connection, wanted: ServerFacts
) -> ServerFacts:
    async def attempt() -> ServerFacts:
        with tally() as billed:
            try:
                found = await _Probe(spec, calls, connection).found()
            except FAULTS as error:
                if is_full(error):
                    await connection.make_room()
                raise
            finally:
                await connection.close()
        return replace(wanted, **found, tokens=billed.tokens)

    async def repair(_: bool) -> None:
        """Begin anew, with another model."""

    return await calls.persist("probing the server", attempt, repair)


class _Probe:
    """One probe, with a model of its own."""

    def __init__(self, spec: BackendSpec, calls: ApiCalls, connection: Connection) -> None:
        self._spec, self._calls, self._connection = spec, calls, connection
        self._began_s = time.monotonic()
        self._training: TrainingClient
        self._first: Floats  # log-probabilities before any step
        self._now: Floats  # after the newest one

    async def found(self) -> dict[str, Any]:
        """Return the fields of `ServerFacts` that were found out."""
        service, spec = await self._connection.service(), self._spec
        create = partial(service.create_lora_training_client, spec.model, rank=spec.lora_rank, seed=0)
        try:
            self._training = await self._once(create)
        except FAULTS as error:
            raise (model_refusal(spec, error) if is_refusal(error) else error) from error
        older = await self._once(
            partial(self._training.save_weights_and_get_sampling_client, retry_config=ONCE)
        )
        self._first = self._now = await self._forward()
        facts: dict[str, Any] = {"divisors": {}, "hundredth": {}}
        facts["scores"] = await self._answer("compute_logprobs", self._scores(older))
        facts["clips"] = await self._answer("grad_clip_norm", self._clips())
        # before positive weights, of which an optimizer that is not to remember them might
        descends = {form: await self._answer(form, self._descends(form)) for form in FORMS}
        for form in FORMS:
            divisor, hundredth = await self._answer(form, self._divisor(form)) or (UNKNOWN, None)
            facts["divisors"][form] = OTHER if descends[form] is False else divisor
            if hundredth is not None:
                facts["hundredth"][form] = hundredth
        facts["keeps_weights"] = await self._answer("an older sampler", self._keeps_weights(older))
        facts["repeats"] = await self._answer("a request sent again", self._repeats())
        facts["loads_states"] = await self._answer("a model from a state", self._loads_states())
        return facts

    async def _scores(self, older: SamplingClient) -> bool:
        """Whether each token is scored once, as in training."""
        call = partial(older.compute_logprobs, types.ModelInput.from_ints(list(TOKENS)))
        scores = await self._billed(Tokens(len(TOKENS), sample=1), call)
        if len(scores) != len(TOKENS) or None in scores[1:]:
            return False
        gaps = np.abs(np.array(scores[1:], dtype=np.float64) - self._first)
        return bool(gaps.mean() <= GAP_NATS)

    async def _clips(self) -> bool | None:
        """Whether a gradient that is to be cut to nothing moves nothing. The first steps of the model."""
        if await self._moves("cross_entropy", eps=NO_EPS, grad_clip_norm=NO_NORM):
            return False
        return True if await self._moves("cross_entropy", eps=NO_EPS) else None

    async def _divisor(self, form: Name) -> tuple[str, float] | None:
        """Return by what a loss is divided, and the relative gradient of a small weight; None: not told."""
        short, long = np.zeros(SHORT), np.zeros(LONG)
        short[PLACE] = long[PLACE] = 1.0
        long[FURTHER] = FAINT
        requests: list[Weights] = [[short], [SMALL * short], [short, long], [long]]
        lengths = []
        for request in requests:
            length = gradient_norm(await self._train(form, request, Adam(learning_rate=0.0)))
            if length is None:
                return None
            lengths.append(length)
        ratios = np.array(lengths[1:]) / lengths[0]

        def error(name: str) -> float:
            """Return how far gradients are from those of a divisor."""
            sizes = []
            for request in requests:
                at_place = np.array([weights[PLACE] for weights in request])
                sizes.append(abs((at_place / DIVISORS[name](request)).sum()))
            return float(np.abs(ratios / (np.array(sizes[1:]) / sizes[0]) - 1).max())

        best = min(DIVISORS, key=error)
        return best if error(best) < NEAR else OTHER, float(ratios[0])

    async def _descends(self, form: Name) -> bool | None:
        """Whether a negative weight makes its token less likely."""
        before = self._now[PLACE]
        return bool(self._now[PLACE] < before) if await self._moves(form) else None

    async def _keeps_weights(self, older: SamplingClient) -> bool:
        """Whether an older sampler leaves the weights in training alone."""
        prompt, how = types.ModelInput.from_ints(list(TOKENS)), types.SamplingParams(max_tokens=1)
        await self._billed(Tokens(len(TOKENS), sample=1), partial(older.sample, prompt, 1, how))
        return await self._is_still(float(np.abs(self._now - self._first).max()))

    async def _repeats(self) -> bool | None:
        """Whether a request that is sent again, with the same number, is not done again."""
        weights = np.zeros(SHORT)
        weights[PLACE] = -1.0
        once = await self._differentiated(weights, times=1)
        twice = await self._differentiated(weights, times=2)
        before = self._now
        how = await self._moves("cross_entropy", beta1=0.9, beta2=0.95)  # without a gradient it goes on
        if how is None:
            return None
        moved = float(np.abs(self._now - before).max())
        step = types.OptimStepRequest(
            optim_params=how, model_id=self._training.model_id, seq_id=self._training._request_id_counter
        )
        await self._once(partial(self._post, lambda client: client.training.optim_step(request=step)))
        is_still = await self._is_still(moved)
        return is_still and (once is None or twice is None or twice < (1 + STILL) * once)

    async def _differentiated(self, weights: Floats, *, times: int) -> float | None:
        """Return the length of the gradient of one request, sent so often; None: not told."""
        await self._differentiate("cross_entropy", [weights])
        request = types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(
                data=self._data("cross_entropy", [weights]), loss_fn="cross_entropy"
            ),
            model_id=self._training.model_id,
            seq_id=self._training._request_id_counter,  # the number of the newest request
        )
        for _ in range(times - 1):
            send = partial(self._post, lambda client: client.training.forward_backward(request=request))
            await self._once(send)
            self._spec.meter.doubt(Tokens(train=len(weights)))
        return gradient_norm(await self._step(Adam(learning_rate=0.0)))

    async def _loads_states(self) -> bool:
        """Whether a model made of a saved state, in another session, has its weights."""
        name = f"{SAVED}-{secrets.token_hex(4)}"
        answer = await self._once(partial(self._training.save_state, name, ttl_seconds=EXPORT_LIVES_S))
        await self._connection.close()  # first: its model takes a place at the server
        service = await self._connection.service()
        try:
            self._training = await self._once(
                partial(service.create_training_client_from_state_with_optimizer, answer.path)
            )
        except FAULTS as error:
            if is_refusal(error):
                return False
            raise
        finally:
            delete = methodcaller("delete_checkpoint_from_tinker_path", answer.path)
            with suppress(*FAULTS):  # it expires
                await in_thread(partial(ask, self._spec.base_url, delete, ANSWER_S))
        return await self._is_still(float(np.abs(self._now - self._first).max()))

    async def _is_still(self, moved: float) -> bool:
        """Whether the policy is where it was, compared with how far it had moved."""
        before, self._now = self._now, await self._forward()
        return bool(np.abs(self._now - before).max() < STILL * moved)

    async def _moves(self, form: Name, **adam: float) -> types.AdamParams | None:
        """Return the settings of the first step that makes PLACE's token less likely; None if none does."""
        weights = np.zeros(SHORT)
        weights[PLACE] = -1.0
        for lr in RATES:
            how = Adam(learning_rate=lr, **adam)
            await self._train(form, [weights], how)
            before, self._now = self._now, await self._forward()
            if abs(self._now[PLACE] - before[PLACE]) >= MOVED_NATS:
                return how
        return None

    async def _forward(self) -> Floats:
        data = self._data("cross_entropy", [np.zeros(LONG)])
        call = partial(self._training.forward, data, "cross_entropy")
        (output,) = (await self._billed(Tokens(LONG), call)).loss_fn_outputs
        logprobs = np.asarray(output["logprobs"].data, dtype=np.float64)
        if len(logprobs) != LONG or not np.isfinite(logprobs).all():
            raise ValueError(f"the server returned {logprobs} as log-probabilities of {LONG} tokens")
        return logprobs

    async def _train(self, form: Name, request: Weights, how: types.AdamParams) -> dict[str, float]:
        return {**await self._differentiate(form, request), **await self._step(how)}

    async def _differentiate(self, form: Name, request: Weights) -> dict[str, float]:
        call = partial(self._training.forward_backward, self._data(form, request), form)
        answer = await self._billed(Tokens(train=sum(map(len, request))), call)
        return answer.metrics or {}

    async def _step(self, how: types.AdamParams) -> dict[str, float]:
        return (await self._once(partial(self._training.optim_step, how))).metrics or {}

    def _data(self, form: Name, request: Weights) -> list[types.Datum]:
        data = []
        for weights in request:
            size, names = len(weights), {"weights": weights}
            if form != "cross_entropy":
                names = {"advantages": weights, "logprobs": self._now[:size]}
            inputs = {
                name: TensorData.from_numpy(np.asarray(array, np.float32)) for name, array in names.items()
            }
            inputs["target_tokens"] = TensorData.from_numpy(np.array(TOKENS[1 : size + 1], dtype=np.int64))
            tokens = types.ModelInput.from_ints(list(TOKENS[:size]))
            data.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
        return data

    def _post(self, request: Callable[[AsyncTinker], Awaitable[T]]) -> Awaitable[T]:
        """Send a request that the SDK would not send twice."""
        holder = self._training.holder

        async def post() -> T:
            with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
                return await request(client)

        done: Awaitable[T] = holder.run_coroutine_threadsafe(post())
        return done

    async def _once(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._calls.once("probe", call)

    async def _billed(self, cost: Tokens, call: Callable[[], Awaitable[T]]) -> T:
        return await self._once(partial(self._calls.billed, cost, call))

    async def _answer(self, what: str, question: Awaitable[T]) -> T | None:
        """Return the answer to a question; None if the server refuses it, so that it is not known."""
        self._spec.observe(StartProgress(f"asking the server: {what}", time.monotonic() - self._began_s))
        try:
            return await question
        except FAULTS as error:
            if classify(error) not in (Fault.WRONG, Fault.BROKEN) and not lacks_route(error):
                raise
            log.warning("the server does not tell about %s (%s)", what, describe(error))
            return None
