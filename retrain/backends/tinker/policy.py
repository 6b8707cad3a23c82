"""One run's policy at the Tinker API.

Every call holds one of the campaign's permits from submission to result, including long polling. The
SDK's own housekeeping (a heartbeat every ten seconds, settings, telemetry) holds none.

The API computes training log-probabilities at temperature 1, so sample at temperature 1. It does its own
batching: `micro_batches` is ignored. The KL term's reference is the policy before training: the base model,
or a saved start.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
from collections.abc import Callable, Container, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial, wraps
from operator import methodcaller
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import tinker
from tinker import SamplingClient, types

from retrain.backends import (
    SELF,
    Backend,
    BackendInfo,
    BackendSpec,
    Optimization,
    Sampling,
    Teacher,
    TeacherSpec,
    UpdateStats,
    other_token,
)
from retrain.backends.engines import Drawn, Ids
from retrain.backends.text import (
    Schemas,
    Text,
    check_finite,
    check_turns,
    extended,
    offer_functions,
    to_groups,
    with_messages,
)
from retrain.backends.tinker import TinkerOptions
from retrain.backends.tinker.calls import FAULTS, ONCE, ApiCalls, describe, finish, is_refusal, is_too_long
from retrain.backends.tinker.probe import facts_of
from retrain.backends.tinker.saved_states import TRAINED, Sampler, ask, read_state, write_state
from retrain.backends.tinker.server_facts import OFFICIAL, SUM, ServerFacts, address_of, findings, refusals
from retrain.backends.tinker.session import Session, Update, sampled
from retrain.backends.tinker.wire import (
    LINEAR,
    LOSS,
    RATIO,
    ApiLoss,
    Auditor,
    Linear,
    api_loss,
    scored_by,
    to_datum,
)
from retrain.base.errors import ConfigError, FullContextError, NonFiniteError, RecordsError, RunFailedError
from retrain.base.event_loop import EventLoopThread, in_thread
from retrain.base.json_lines import Demonstration
from retrain.base.rollouts import (
    SUPERVISED,
    CallForm,
    Floats,
    Group,
    Loss,
    NextTurn,
    Prompt,
    Rollout,
    TeacherScores,
    TrainingSample,
)
from retrain.config.files import state_of
from retrain.config.schema import Config
from retrain.records.spending import Tokens

PATIENCE = 2  # failures of one call before a new session is opened
ANSWER_S = 30.0  # to a question
T = TypeVar("T")
P = ParamSpec("P")
log = logging.getLogger(__name__)
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that tokenizers are all without PyTorch


def _in_loop(
    method: Callable[Concatenate[TinkerBackend, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[TinkerBackend, P], T]:
    """Return a method that waits, in any thread, for a coroutine in the backend's event loop."""

    @wraps(method)
    def call(backend: TinkerBackend, /, *args: P.args, **how: P.kwargs) -> T:
        return backend._loop.wait_for(method(backend, *args, **how))

    return call


class TinkerBackend(Backend):
    """One run's policy at the API; callable from any thread, and sampling may overlap an update."""

    info = BackendInfo(parameters=0, remote=True, bills=True, extends=True)  # the API tells no number

    def __init__(self, spec: BackendSpec, options: TinkerOptions) -> None:
        # without a seed, draw one, so that a rebuilt session gets the same adapter
        seed = spec.seed if spec.seed >= 0 else secrets.randbelow(2**31)
        self._loop = EventLoopThread()
        self._spec = spec
        self._options = options
        self._calls = ApiCalls(spec, options)
        spec = replace(spec, seed=seed, run_name=spec.run_name or "run")
        self.session = Session(spec, self._calls)
        self._reference = Reference(spec, self.session)
        self._teachers: list[Reference] = []
        self._places = asyncio.Semaphore(options.requests_at_once)
        self._text: Text | None = None
        self._loading = asyncio.Lock()  # held while the tokenizer is loaded
        self._context: int | None = None  # tokens that the model reads; None: not known
        self._auditor = Auditor()

    @_in_loop
    async def open(self) -> None:
        """Open the session and find out how the server behaves; load the tokenizer if that needs no model."""
        facts = OFFICIAL if not address_of(self._spec.base_url) else ServerFacts()
        await self.session.open()
        if facts is not OFFICIAL and self._options.probe:
            facts = await facts_of(self._spec, self._calls, self.session.connection)
        self._calls.server = facts
        for finding in findings(facts) if self._options.probe else ():
            if finding.is_right is False:
                log.warning("at this server, %s %s: %s", finding.what, finding.found, finding.then)
        if self._options.tokenizer:
            await self._tokenizer()

    def check_run(self, config: Config) -> None:
        if problems := [str(problem) for problem in refusals(self._calls.server, config)]:
            raise ConfigError(problems)

    @_in_loop
    async def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample each prompt's group with one call; if one fails, cancel the others."""
        text = await self._tokenizer()

        async def group(prompt: Prompt, ids: Ids) -> Group:
            version, completions = await self._drawn(ids, prompt, sampling)
            return to_groups(text, [prompt], completions, sampling.group_size, version)[0]

        encoded = [(prompt, self._read(prompt, text)) for prompt in prompts]  # all, before anything is billed
        return await _all(itertools.starmap(group, encoded))

    @_in_loop
    async def check_turns(self) -> None:
        check_turns(await self._tokenizer())
        self._context = await context_of(self._spec, self._calls)

    @_in_loop
    async def offer_tools(self, schemas: Schemas, *, is_extended: bool = True) -> CallForm:
        form = offer_functions(await self._tokenizer(), schemas, is_extended=is_extended)
        self._context = await context_of(self._spec, self._calls)
        return form

    @_in_loop
    async def call_form(self, schemas: Schemas) -> CallForm:
        return offer_functions((await self._tokenizer()).with_variables(), schemas)

    @_in_loop
    async def extend(self, turns: Sequence[NextTurn], sampling: Sampling) -> list[Rollout | None]:
        """Sample another turn of each rollout that the context has room for, with one call each."""
        how, text = replace(sampling, group_size=1), await self._tokenizer()

        async def further(rollout: Rollout, max_tokens: int) -> Rollout | None:
            ids = self.read(rollout)
            if self._context is not None and len(ids) >= self._context:
                return None
            try:
                _, (turn,) = await self._drawn(ids, rollout.prompt, replace(how, max_tokens=max_tokens))
            except FullContextError:  # of a server that does not tell its context before
                return None
            check_finite([turn])
            return extended(text, rollout, turn)

        rollouts = [(with_messages(text, turn, self._context), turn.max_tokens) for turn in turns]
        return await _all(itertools.starmap(further, rollouts))

    def read(self, rollout: Rollout) -> Ids:
        assert self._text is not None  # loaded to sample it
        return (*self._text.encode(rollout.prompt), *rollout.placed()[0])

    @_in_loop
    async def shown(self, tokens: Ids) -> str:
        return (await self._tokenizer()).completions([tokens])[0]

    @_in_loop
    async def update(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> UpdateStats:
        """Take one Adam step; gradient computation and step are submitted together.

        A loss that the API does not compute takes a forward pass before them.
        """
        has_more = optimization.kl_coef or optimization.entropy_bonus
        api_form, linear = None if has_more else api_loss(loss, samples), None
        server, sent = self._calls.server, samples
        if api_form is not None and server.divisor(api_form.name) != SUM:
            api_form = None
        on_policy = loss.name != SUPERVISED
        if api_form is None:
            linear = await self._linearized(samples, loss, optimization)
            api_form, samples, loss = linear.form, linear.samples, linear.loss
            sent = linear.sent()
        data = await self._data(sent, api_form)
        if len(self.session.since) >= self._options.replay_steps:
            await self.session.save()
        on_policy &= {s.rollout.policy_version for s in samples} == {self.session.version}
        outcome = await self.session.update(
            Update(data, api_form, self._adam(optimization), optimization.is_last)
        )
        if server.divisor(api_form.name) != SUM:
            outcome.metrics.pop(LOSS, None)  # of the average
        stats = self._auditor.read(samples, loss, outcome, on_policy=on_policy)
        if linear is not None:
            stats = linear.stats(stats)
        if not np.isfinite([stats.loss, stats.grad_norm]).all():
            await self.session.undo()
            raise NonFiniteError(
                f"loss {stats.loss}, gradient norm {stats.grad_norm}; the step was taken back, lower lr"
            )
        return stats

    async def _linearized(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> Linear:
        text = await self._tokenizer()

        async def near(sample: TrainingSample) -> Floats:
            async with self._places:
                return await self._reference.logprobs(text.encode(sample.rollout.prompt), sample.rollout)

        blank = [replace(sample, advantages=np.zeros(len(sample.advantages))) for sample in samples]
        update = Update(await self._data(blank, LINEAR), LINEAR, self._adam(optimization))
        logprobs = scored_by(samples, await self.session.forward(update))
        if logprobs is None:
            raise RunFailedError(
                f"[algorithm].loss_mode: {loss.name!r} needs the server's log-probabilities; it returns none"
            )
        reference = None
        if optimization.kl_coef:
            reference = np.concatenate(await _all(map(near, samples)))
        form = LINEAR if self._calls.server.linear_form == LINEAR.name else RATIO
        return Linear.of(samples, loss, optimization, logprobs, reference, form)

    async def _data(self, samples: Sequence[TrainingSample], loss: ApiLoss) -> list[types.Datum]:
        text = await self._tokenizer()
        return [to_datum(text.encode(sample.rollout.prompt), sample, loss) for sample in samples]

    @_in_loop
    async def written(self, demonstrations: Sequence[Demonstration]) -> list[Rollout]:
        text = await self._tokenizer()
        for demonstration in demonstrations:
            text.encode(demonstration.prompt)
        return [text.written(demonstration) for demonstration in demonstrations]

    @_in_loop
    async def reset_optimizer(self) -> None:
        await self.session.reset_optimizer()

    @_in_loop
    async def start_from(self, adapter: str, *, is_reference: bool) -> None:
        """Continue with a saved state's weights, which become the KL term's reference instead of the base."""
        await self.session.start_from(state_of(adapter))
        if is_reference:
            self._reference.path = await self.session.save_sampler("start")

    def has_start(self) -> bool:
        return bool(self._reference.path)

    @_in_loop
    async def open_teacher(self, teacher: TeacherSpec) -> TinkerTeacher:
        """Return a base model, a saved state or a finished run's, as a teacher; "self" is the base model."""
        name = "" if teacher.name == SELF else teacher.name
        path = state_of(name)
        scorer = Reference(self._spec, self.session, "[teacher].teacher", "" if path else name)
        if TRAINED.fullmatch(path):  # saved for training, which the API does not sample from
            path = await self.session.sampler_of(path)
        scorer.path = path
        try:
            client = await self.session.persist(f"opening {path or name or 'the teacher'}", scorer.client)
        except RecordsError as error:
            raise ConfigError(f"[teacher].teacher: {error}") from error
        if not path and name not in ("", self._spec.model):
            own, theirs = (await self._tokenizer()).vocabulary, await in_thread(client.get_tokenizer)
            if other := other_token(own, theirs.get_vocab()):
                raise ConfigError(f"[teacher].teacher: {other}")
        self._teachers.append(scorer)
        return TinkerTeacher(partial(self.scored, scorer))

    @_in_loop
    async def scored(self, scorer: Reference, rollouts: Sequence[Rollout]) -> list[TeacherScores]:
        text = await self._tokenizer()

        async def scores(rollout: Rollout) -> TeacherScores:
            ids = text.encode(rollout.prompt)
            async with self._places:
                logprobs = await scorer.logprobs(ids, rollout)
            return TeacherScores(logprobs, len(ids) + rollout.length)

        return await _all(map(scores, rollouts))

    @_in_loop
    async def save(self, directory: Path) -> None:
        state = await self.session.save()
        for needed in (self._reference, *self._teachers):
            await needed.extend()
        state = replace(state, reference=self._reference.path)
        write_state(directory, state, self._spec.model, self._spec.lora_rank)

    @_in_loop
    async def load(self, directory: Path) -> None:
        state = read_state(directory, self._spec.model, self._spec.lora_rank)
        self._reference.path = state.reference
        await self.session.resume(state)

    def out_s(self) -> float:
        return self._calls.outages.out_s()

    def close(self) -> None:
        try:
            self._loop.wait_for(self.session.close())
        finally:
            self._loop.close()

    async def _tokenizer(self) -> Text:
        options, key = self._options, "[backend.options].tokenizer"
        name = options.tokenizer or self._spec.model

        def from_files() -> Any:
            from transformers import AutoTokenizer  # slow

            return AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # else it may ask a terminal

        async with self._loading:
            if self._text is not None:
                return self._text
            try:
                local = in_thread(from_files) if options.tokenizer else None
                tokenizer = await (local or self.session.tokenizer())
            except (OSError, ValueError, ImportError, RuntimeError, KeyError) as error:
                which = repr(name) if options.tokenizer else f"of {name!r}"
                raise ConfigError(
                    f"{key}: the tokenizer {which} cannot be loaded "
                    f"({type(error).__name__}: {str(error)[:300]}); name a local directory or a hub id"
                ) from error
            added = tokenizer.added_tokens_decoder.items()
            self._text = Text(
                tokenizer,
                name,
                chat=options.chat_template,
                system=options.system_prompt,
                template_kwargs=options.chat_template_kwargs,
                hidden=[token for token, facts in added if facts.special],
                key=key,
            )
            return self._text

    def _adam(self, optimization: Optimization) -> types.AdamParams:
        options = self._options
        return types.AdamParams(
            learning_rate=optimization.lr,
            beta1=options.beta1,
            beta2=options.beta2,
            eps=options.eps,
            weight_decay=options.weight_decay,
            grad_clip_norm=optimization.max_grad_norm,
        )

    def _read(self, prompt: Prompt, text: Text) -> Ids:
        ids = text.encode(prompt)
        if self._context is not None and len(ids) >= self._context:
            raise FullContextError(
                f"prompt {prompt.id} has {len(ids)} tokens, which leaves no room in the model's "
                f"context of {self._context}"
            )
        return ids

    async def _drawn(self, ids: Ids, prompt: Prompt, sampling: Sampling) -> tuple[int, list[Drawn]]:
        if self._context is not None:
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, self._context - len(ids)))
        ends = (await self._tokenizer()).end_ids
        async with self._places:
            return await drawn(self.session, ids, prompt, sampling, ends)


class TinkerTeacher(Teacher):
    """Weights at the API that score tokens, one call for each rollout."""

    def __init__(self, scored: Callable[[Sequence[Rollout]], list[TeacherScores]]) -> None:
        self._scored = scored

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores]:
        return self._scored(rollouts)


async def drawn(
    session: Session, ids: Ids, prompt: Prompt, how: Sampling, ends: Ids
) -> tuple[int, list[Drawn]]:
    """Return the completions of token ids, with one call, and the version of their policy.

    Args:
        prompt: the one that they belong to, for messages.
        ends: token ids that end a completion.
    """
    tokens, length = types.ModelInput.from_ints(list(ids)), len(ids)
    params = types.SamplingParams(max_tokens=how.max_tokens, temperature=how.temperature, stop=list(ends))
    most = Tokens(length, (how.group_size - 1) * length, how.group_size * how.max_tokens)
    used: Sampler | None = None
    failures = generation = 0

    async def attempt() -> tuple[int, types.SampleResponse]:
        nonlocal used, generation
        used, generation = None, session.generation
        used = sampler = await session.sampler()
        call = partial(sampler.client.sample, tokens, how.group_size, params)
        bill = partial(session.calls.billed, most, call, partial(sampled, length))
        return sampler.version, await session.calls.once("sample", bill)

    async def repair(lost: bool) -> None:
        nonlocal failures
        failures += 1
        if lost and failures == 1 and used is not None:
            await session.renew_sampler(used)
        elif (lost and used is None) or failures % PATIENCE == 0:
            await session.renew(generation)

    try:
        version, response = await session.calls.persist(f"sampling prompt {prompt.id}", attempt, repair)
    except RunFailedError as error:
        cause = error.__cause__
        if not (isinstance(cause, FAULTS) and is_too_long(cause)):
            raise
        raise FullContextError(
            f"prompt {prompt.id} has {length} tokens, which leave no room for {how.max_tokens} more "
            f"in the model's context ({describe(cause)}); lower training.max_tokens, or leave the prompt out"
        ) from error
    return version, drawn_from(response, prompt, how.group_size, ends)


async def context_of(spec: BackendSpec, calls: ApiCalls) -> int | None:
    """Return how many tokens the run's model reads; None if the API does not tell."""
    try:
        capabilities: types.GetServerCapabilitiesResponse = await calls.once(
            "limits", lambda: tinker.RestClient(base_url=spec.base_url or None).get_server_capabilities()
        )
    except FAULTS:  # other servers of this protocol lack the page
        return None
    models = getattr(capabilities, "supported_models", None) or ()
    return next((one.max_context_length for one in models if one.model_name == spec.model), None)


def drawn_from(
    response: types.SampleResponse, prompt: Prompt, group_size: int, ends: Container[int]
) -> list[Drawn]:
    """Return the API's samples; a RunFailedError if they do not match the request."""
    if len(response.sequences) != group_size:
        raise RunFailedError(
            f"prompt {prompt.id}: asked for {group_size} rollouts, got {len(response.sequences)}"
        )
    completions = []
    for sequence in response.sequences:
        tokens = tuple(sequence.tokens)
        logprobs = np.asarray(sequence.logprobs or (), dtype=np.float64)
        if len(logprobs) != len(tokens) or not np.isfinite(logprobs).all():
            raise RunFailedError(
                f"prompt {prompt.id}: the API sampled {len(tokens)} tokens with {len(logprobs)} "
                "log-probabilities; needs a finite one for each"
            )
        ended = sequence.stop_reason != "length" or (bool(tokens) and tokens[-1] in ends)
        completions.append(Drawn(tokens, logprobs, entropy=float("nan"), ended=ended))
    return completions


class Reference:
    """Scores rollouts with weights that are not trained. Use in one event loop."""

    def __init__(
        self, spec: BackendSpec, session: Session, key: str = "[algorithm].kl_coef", model: str = ""
    ) -> None:
        self._spec, self._session, self._calls = spec, session, session.calls
        self._ttl_s = session.calls.options.state_ttl_s
        self._key, self._model = key, model or spec.model
        self.path = ""  # of weights that were saved for sampling; empty: the base model
        self._lock = asyncio.Lock()  # held while the client is made
        self._client: SamplingClient | None = None
        self._generation = 0  # of the session that the client belongs to

    async def logprobs(self, prompt: Sequence[int], rollout: Rollout) -> Floats:
        """Return the log-probabilities of a rollout's sampled tokens after a prompt's, with one call."""
        read, places = rollout.placed()
        tokens = types.ModelInput.from_ints([*prompt, *read])
        cost = Tokens(int(tokens.length), sample=1)  # the SDK has a token sampled

        async def attempt() -> list[float | None]:
            call = partial((await self.client()).compute_logprobs, tokens)
            return await self._calls.once("reference", partial(self._calls.billed, cost, call))

        scores = await self._session.persist(f"scoring for {self._key}", attempt)
        values = np.array([scores[len(prompt) + place] for place in places], dtype=np.float64)
        if not np.isfinite(values).all():
            what = f"a rollout of prompt {rollout.prompt.id}"
            raise RunFailedError(
                f"{self._key}: the API does not score {what} with {self.path or self._model}"
            )
        return values

    async def extend(self) -> None:
        """Have what is saved expire no earlier than a checkpoint of now."""
        if not self.path or self._ttl_s is None:
            return
        extend = methodcaller("set_checkpoint_ttl_from_tinker_path", self.path, self._ttl_s)
        question = partial(ask, self._spec.base_url, extend, ANSWER_S)
        try:
            await self._calls.once("extend", lambda: in_thread(question))
        except FAULTS as error:
            log.warning("%s, for %s, may expire early: %s", self.path, self._key, describe(error))

    async def client(self) -> SamplingClient:
        """Return a client of the present session. May fail like any call."""
        async with self._lock:
            if self._client is None or self._generation != self._session.generation:
                self._generation = self._session.generation
                service = await self._session.service()
                which = {"model_path": self.path} if self.path else {"base_model": self._model}
                self._client = None
                try:
                    make = partial(service.create_sampling_client, **which, retry_config=ONCE)
                    self._client = await self._calls.once("reference", make)
                except FAULTS as error:
                    if not self.path and self._model != self._spec.model and is_refusal(error):
                        what = f"the API refuses {self._model!r} ({describe(error)})"
                        raise ConfigError(f"{self._key}: {what}; name a model that it serves") from error
                    if self.path and is_refusal(error):
                        what = f"the API no longer has this reference, of {self._key} ({describe(error)})"
                        raise RecordsError(f"{self.path}: {what}; start the run again") from error
                    raise
            return self._client


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what all calls return; if one fails, cancel the others."""
    running = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*running)
    finally:
        await finish(running)
