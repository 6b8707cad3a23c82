"""Calls of sampling clients, with retries: completions of token ids, and scores by the KL term's reference.

The reference is the policy before training: the base model, or a saved start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container, Sequence
from functools import partial
from operator import methodcaller

import numpy as np
import tinker
from tinker import SamplingClient
from tinker.types import GetServerCapabilitiesResponse, ModelInput, SampleResponse, SamplingParams

from retrain.backends import BackendSpec, Sampling
from retrain.backends.engines import Drawn, Ids
from retrain.backends.tinker import billing
from retrain.backends.tinker.billing import sampled
from retrain.backends.tinker.calls import ONCE, ApiCalls
from retrain.backends.tinker.faults import FAULTS, describe, is_refusal, is_too_long
from retrain.backends.tinker.saved_states import Sampler, ask
from retrain.backends.tinker.session import Session
from retrain.base.errors import FullContextError, RecordsError, RunFailedError
from retrain.base.event_loop import in_thread
from retrain.base.rollouts import Floats, Prompt, Rollout
from retrain.records.spending import Tokens

PATIENCE = 2  # failures of one call before a new session is opened
ANSWER_S = 30.0  # to a question
log = logging.getLogger(__name__)


async def drawn(
    session: Session, ids: Ids, prompt: Prompt, how: Sampling, ends: Ids
) -> tuple[int, list[Drawn]]:
    """Return the completions of token ids, with one call, and the version of their policy.

    Args:
        prompt: the one that they belong to, for messages.
        ends: token ids that end a completion.
    """
    tokens, length = ModelInput.from_ints(list(ids)), len(ids)
    params = SamplingParams(max_tokens=how.max_tokens, temperature=how.temperature, stop=list(ends))
    most = billing.sampling(length, how.group_size, how.max_tokens)
    used: Sampler | None = None
    failures = generation = 0

    async def attempt() -> tuple[int, SampleResponse]:
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
        told: GetServerCapabilitiesResponse = await calls.once(
            "limits", lambda: tinker.RestClient(base_url=spec.base_url or None).get_server_capabilities()
        )
    except FAULTS:  # other servers of this protocol lack the page
        return None
    models = getattr(told, "supported_models", None) or ()
    return next((one.max_context_length for one in models if one.model_name == spec.model), None)


def drawn_from(
    response: SampleResponse, prompt: Prompt, group_size: int, ends: Container[int]
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
    """Scores rollouts with the policy before training. Use in one event loop."""

    def __init__(self, spec: BackendSpec, session: Session) -> None:
        self._spec, self._session, self._calls = spec, session, session.calls
        self._ttl_s = session.calls.options.state_ttl_s
        self.path = ""  # of weights that were saved for sampling; empty: the base model
        self._lock = asyncio.Lock()  # held while the client is made
        self._client: SamplingClient | None = None
        self._generation = 0  # of the session that the client belongs to

    async def logprobs(self, prompt: Sequence[int], rollout: Rollout) -> Floats:
        """Return the log-probabilities of a rollout's sampled tokens, with one call."""
        read, places = rollout.placed()
        tokens = ModelInput.from_ints([*prompt, *read])
        cost = Tokens(int(tokens.length), sample=1)  # the SDK has a token sampled

        async def attempt() -> list[float | None]:
            call = partial((await self._sampler()).compute_logprobs, tokens)
            return await self._calls.once("reference", partial(self._calls.billed, cost, call))

        scores = await self._session.persist("scoring with the KL term's reference", attempt)
        values = np.array([scores[len(prompt) + place] for place in places], dtype=np.float64)
        if not np.isfinite(values).all():
            what = f"a rollout of prompt {rollout.prompt.id}"
            raise RunFailedError(f"[algorithm].kl_coef: the API does not score {what} with the reference")
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
            log.warning("%s, which the KL term needs, may expire early: %s", self.path, describe(error))

    async def _sampler(self) -> SamplingClient:
        """Return a client of the present session. May fail like any call."""
        async with self._lock:
            if self._client is None or self._generation != self._session.generation:
                self._generation = self._session.generation
                service = await self._session.service()
                which = {"model_path": self.path} if self.path else {"base_model": self._spec.model}
                self._client = None
                try:
                    make = partial(service.create_sampling_client, **which, retry_config=ONCE)
                    self._client = await self._calls.once("reference", make)
                except FAULTS as error:
                    if self.path and is_refusal(error):
                        raise RecordsError(
                            f"{self.path}: the API no longer has this reference ({describe(error)}); "
                            "start the run again"
                        ) from error
                    raise
            return self._client
