"""The base model, which is the policy before training: the reference of the KL term."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import numpy as np
from tinker import SamplingClient
from tinker.types import ModelInput

from retrain.backends import BackendSpec
from retrain.backends.tinker.billing import billed
from retrain.backends.tinker.calls import Calls
from retrain.backends.tinker.session import Session
from retrain.errors import RunFailedError
from retrain.records.spending import Tokens
from retrain.rollouts import Floats, Rollout


class Reference:
    """Scores rollouts with the base model. Use in one event loop."""

    def __init__(self, spec: BackendSpec, session: Session, calls: Calls) -> None:
        self._spec, self._session, self._calls = spec, session, calls
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
            generation, client = self._session.generation, await self._base_model()

            def call() -> Awaitable[list[float | None]]:
                found: Awaitable[list[float | None]] = client.compute_logprobs(tokens)
                return found

            cost = Tokens(int(tokens.length), sample=1)  # the SDK has a token sampled
            return await self._calls.once(
                "reference", lambda: billed(self._spec.meter, cost, call, lambda _: cost)
            )

        async def repair(lost: bool) -> None:
            if lost:
                await self._session.renew(generation)

        found = await self._calls.persist("scoring with the base model", attempt, repair)
        values = np.array([found[len(prompt) + place] for place in places], dtype=np.float64)
        if not np.isfinite(values).all():
            what = f"a rollout of prompt {rollout.prompt.id}"
            raise RunFailedError(f"[algorithm].kl_coef: the API does not score {what} with the base model")
        return values

    async def _base_model(self) -> SamplingClient:
        """Return a client of the present session. May fail like any call."""
        async with self._lock:
            if self._client is None or self._generation != self._session.generation:
                self._generation = self._session.generation
                service = await self._session.service()

                def make() -> Awaitable[SamplingClient]:
                    client: Awaitable[SamplingClient] = service.create_sampling_client(
                        base_model=self._spec.model
                    )
                    return client

                self._client = None
                self._client = await self._calls.once("base model", make)
            return self._client
