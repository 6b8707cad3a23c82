"""Sampling calls: completions of token ids, with retries; and how many tokens a model reads."""

from __future__ import annotations

from functools import partial

import tinker
from tinker.types import GetServerCapabilitiesResponse, ModelInput, SampleResponse, SamplingParams

from retrain.backends import BackendSpec, Sampling
from retrain.backends.tinker import billing
from retrain.backends.tinker.billing import billed, sampled
from retrain.backends.tinker.calls import Calls
from retrain.backends.tinker.faults import FAULTS, describe, is_too_long
from retrain.backends.tinker.session import Session
from retrain.backends.tinker.state import Sampler
from retrain.backends.tinker.wire import drawn_from
from retrain.engines import Drawn, Ids
from retrain.errors import FullContextError, RunFailedError
from retrain.rollouts import Prompt

PATIENCE = 2  # failures of one call before a new session is opened


async def drawn(
    spec: BackendSpec, session: Session, calls: Calls, ids: Ids, prompt: Prompt, how: Sampling, ends: Ids
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
        return sampler.version, await calls.once(
            "sample", lambda: billed(spec.meter, most, call, partial(sampled, length))
        )

    async def repair(lost: bool) -> None:
        nonlocal failures
        failures += 1
        if lost and failures == 1 and used is not None:
            await session.renew_sampler(used)
        elif (lost and used is None) or failures % PATIENCE == 0:
            await session.renew(generation)

    try:
        version, response = await calls.persist(f"sampling prompt {prompt.id}", attempt, repair)
    except RunFailedError as error:
        cause = error.__cause__
        if not (isinstance(cause, FAULTS) and is_too_long(cause)):
            raise
        raise FullContextError(
            f"prompt {prompt.id} has {length} tokens, which leave no room for {how.max_tokens} more "
            f"in the model's context ({describe(cause)}); lower training.max_tokens, or leave the prompt out"
        ) from error
    return version, drawn_from(response, prompt, how.group_size, ends)


async def context_of(spec: BackendSpec, calls: Calls) -> int | None:
    """Return how many tokens the run's model reads; None if the API does not tell."""
    try:
        told: GetServerCapabilitiesResponse = await calls.once(
            "limits", lambda: tinker.RestClient(base_url=spec.base_url or None).get_server_capabilities()
        )
    except FAULTS:  # other servers of this protocol lack the page
        return None
    models = getattr(told, "supported_models", None) or ()
    return next((one.max_context_length for one in models if one.model_name == spec.model), None)
