"""The policy before training, which is the reference of the KL term: the base model, or a saved start."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
from tinker import SamplingClient
from tinker.types import ModelInput

from retrain.backends import BackendSpec
from retrain.backends.tinker import TinkerOptions
from retrain.backends.tinker.billing import billed
from retrain.backends.tinker.calls import Calls
from retrain.backends.tinker.faults import FAULTS, describe, is_refusal
from retrain.backends.tinker.rest import ask
from retrain.backends.tinker.session import Session
from retrain.errors import RecordsError, RunFailedError
from retrain.event_loop import in_thread
from retrain.records.spending import Tokens
from retrain.rollouts import Floats, Rollout

ANSWER_S = 30.0
log = logging.getLogger(__name__)


class Reference:
    """Scores rollouts with the policy before training. Use in one event loop."""

    def __init__(self, spec: BackendSpec, options: TinkerOptions, session: Session, calls: Calls) -> None:
        self._spec, self._session, self._calls = spec, session, calls
        self._ttl_s = options.state_ttl_s
        self.path = ""  # of weights that were saved for sampling; empty: the base model
        self._lock = asyncio.Lock()  # held while the client is made
        self._client: SamplingClient | None = None
        self._generation = 0  # of the session that the client belongs to

    async def logprobs(self, prompt: Sequence[int], rollout: Rollout) -> Floats:
        """Return the log-probabilities of a rollout's sampled tokens, with one call."""
        read, places = rollout.placed()
        tokens = ModelInput.from_ints([*prompt, *read])
        generation = self._session.generation

        async def attempt() -> list[float | None]:
            nonlocal generation
            generation, client = self._session.generation, await self._sampler()
            cost = Tokens(int(tokens.length), sample=1)  # the SDK has a token sampled
            call = partial(client.compute_logprobs, tokens)
            return await self._calls.once(
                "reference", lambda: billed(self._spec.meter, cost, call, lambda _: cost)
            )

        async def repair(lost: bool) -> None:
            if lost:
                await self._session.renew(generation)

        found = await self._calls.persist("scoring with the KL term's reference", attempt, repair)
        values = np.array([found[len(prompt) + place] for place in places], dtype=np.float64)
        if not np.isfinite(values).all():
            what = f"a rollout of prompt {rollout.prompt.id}"
            raise RunFailedError(f"[algorithm].kl_coef: the API does not score {what} with the reference")
        return values

    async def extend(self) -> None:
        """Have what is saved expire no earlier than a checkpoint of now."""
        if not self.path or self._ttl_s is None:
            return
        url, path, ttl_s = self._spec.base_url, self.path, self._ttl_s

        def ask_for_it() -> None:
            ask(url, lambda client: client.set_checkpoint_ttl_from_tinker_path(path, ttl_s), ANSWER_S)

        try:
            await self._calls.once("extend", lambda: in_thread(ask_for_it))
        except FAULTS as error:
            log.warning("%s, which the KL term needs, may expire early: %s", path, describe(error))

    async def _sampler(self) -> SamplingClient:
        """Return a client of the present session. May fail like any call."""
        async with self._lock:
            if self._client is None or self._generation != self._session.generation:
                self._generation = self._session.generation
                service = await self._session.service()
                which = {"model_path": self.path} if self.path else {"base_model": self._spec.model}
                self._client = None
                try:
                    make = partial(service.create_sampling_client, **which)
                    self._client = await self._calls.once("reference", make)
                except FAULTS as error:
                    if self.path and is_refusal(error):
                        raise RecordsError(
                            f"{self.path}: the API no longer has this reference ({describe(error)}); "
                            "start the run again"
                        ) from error
                    raise
            return self._client
