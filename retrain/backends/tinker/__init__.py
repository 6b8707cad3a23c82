"""The Tinker API: a policy that is sampled and trained remotely, through the SDK.

Every call holds one of the campaign's permits from submission to result, including long polling. The
SDK's own housekeeping (a heartbeat every ten seconds, settings, telemetry) holds none. Only the SDK
reads the key, from the environment.

The API computes training log-probabilities at temperature 1, so sample at temperature 1. It has no
entropy bonus and no KL term, and does its own batching: `micro_batches` is ignored.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from retrain import extras
from retrain.backends import BackendInfo, BackendSpec, Optimization, Sampling, UpdateStats
from retrain.backends.tinker.losses import api_loss, loss_problem
from retrain.backends.tinker.options import TinkerOptions, check_options, parse_options
from retrain.backends.tinker.policy import Model, read_state, write_state
from retrain.backends.tinker.wire import check_advantages, datum_arrays, to_datum, to_rollouts
from retrain.demonstrations import Demonstration
from retrain.errors import ConfigError, NonFiniteError
from retrain.rollouts import Group, Loss, Prompt, Rollout, TrainingSample

if TYPE_CHECKING:
    from tinker.types import SampleResponse

    from retrain.backends.tinker.policy import Sampler
    from retrain.backends.tinker.text import Text
    from retrain.config.schema import Config

__all__ = ["TinkerBackend", "advise_run", "check_options", "check_run", "connect", "servers"]

EXTRA = "tinker"
PACKAGES = ("tinker",)
KEYS = ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")  # environment variables from which the SDK gets a key
PATIENCE = 2  # failures of one call before a new session is opened


def connect(spec: BackendSpec) -> Awaitable[TinkerBackend]:
    """Open a session with the API, free of charge.

    Raises:
        ConfigError: an option is wrong, the SDK or the key is missing, or the key is rejected.
        InfrastructureError: the API cannot be reached.
    """
    options = parse_options(spec.options)
    problems = _missing(spec.model)
    if problems:
        raise ConfigError(problems)
    return _open(spec, options)


def check_run(config: Config) -> list[str]:
    """Return the problems that would stop this run, each with its key; free of charge."""
    problems = _missing(config.model.model)
    wrong = loss_problem(config.algorithm.loss_mode)
    if wrong:
        problems.append(f"[algorithm].loss_mode: {wrong}")
    if config.algorithm.loss_mode == "gspo" and config.algorithm.transform_mode != "none":
        problems.append(
            '[algorithm].transform_mode: the Tinker API computes "gspo" for advantages that are equal '
            'within a rollout only; needs "none"'
        )
    if config.training.entropy_bonus:
        problems.append("[training].entropy_bonus: the Tinker API has none; needs 0")
    if config.algorithm.kl_coef:
        problems.append("[algorithm].kl_coef: the Tinker API has no KL term; needs 0")
    return problems


def servers(config: Config) -> dict[str, str]:
    """Return the server that a run needs, as address -> key, unless it is the API's default."""
    if config.model.base_url:
        return {config.model.base_url: "[model].base_url"}
    named = os.environ.get("TINKER_BASE_URL")
    return {named: "[model].base_url (TINKER_BASE_URL)"} if named else {}


def advise_run(config: Config) -> list[str]:
    """Return advice about this configuration."""
    temperature = config.training.temperature
    if temperature == 1.0:
        return []
    return [
        f"the Tinker API scores at temperature 1, and training.temperature = {temperature:g}: importance "
        "ratios would compare different distributions; training.temperature = 1.0 keeps them exact"
    ]


def _missing(model: str) -> list[str]:
    problems = []
    missing = extras.missing_problem("backends", "tinker")
    if missing is not None:
        problems.append(f"[backend].backend: {missing}")
    if not extras.needs("backends", "tinker").has_key():
        problems.append(
            "[backend].backend: 'tinker' needs a key; set the environment variable TINKER_API_KEY "
            "(never a file: run.toml is copied and shared)"
        )
    if not model:
        problems.append("[model].model: needs the name of a model that the API serves")
    return problems


async def _open(spec: BackendSpec, options: TinkerOptions) -> TinkerBackend:
    backend = TinkerBackend(spec, options)
    try:
        await backend.open()
    except BaseException:
        await backend.close()
        raise
    return backend


class TinkerBackend:
    """One run's policy at the API. Use in one event loop; sampling may overlap an update."""

    def __init__(self, spec: BackendSpec, options: TinkerOptions) -> None:
        from retrain.backends.tinker.calls import Calls
        from retrain.backends.tinker.permits import Permits
        from retrain.backends.tinker.session import Session
        from retrain.backends.tinker.stats import Auditor
        from retrain.backends.tinker.text import LazyText

        # without a seed, draw one, so that a rebuilt session gets the same adapter
        seed = spec.seed if spec.seed >= 0 else secrets.randbelow(2**31)
        self._spec = spec
        self._options = options
        self._calls = Calls(Permits(spec.permit, options.permit_timeout_s), options, spec.observe_call)
        self._session = Session(
            Model(spec.model, spec.lora_rank, seed, spec.run_name or "run", spec.base_url),
            options,
            self._calls,
        )
        self._text = LazyText(spec.model, options, self._session)
        self._auditor = Auditor()
        self.info = BackendInfo(parameters=0, remote=True)  # the API does not report the number

    async def open(self) -> None:
        """Open the session; load the tokenizer too if that needs no model."""
        await self._session.open()
        if self._options.tokenizer:
            await self._text.get()

    async def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample each prompt's group with one call.

        Raises:
            InfrastructureError: the API failed for longer than the retry budget.
            RunFailedError: the response does not match the request.
        """
        text = await self._text.get()
        places = asyncio.Semaphore(self._options.requests_at_once)
        return await _all([self._group(prompt, sampling, text, places) for prompt in prompts])

    async def update(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> UpdateStats:
        """Take one Adam step; gradient computation and step are submitted together.

        Raises:
            ConfigError: the API cannot compute the loss, an entropy bonus or a KL term.
            NonFiniteError: the loss or the gradient is not finite; the step is undone.
            InfrastructureError: the API failed for longer than the retry budget.
        """
        if not samples:
            raise ValueError("samples: got none; a step without signal needs no update")
        wanted = api_loss(loss)
        check_advantages(samples, wanted)
        if optimization.entropy_bonus or optimization.kl_coef:
            raise ConfigError("entropy_bonus and kl_coef: the Tinker API has neither; both need to be 0")
        text = await self._text.get()
        data = [to_datum(datum_arrays(text.encode(s.rollout.prompt), s), wanted) for s in samples]
        if self._session.unsaved >= self._options.replay_steps:
            await self._session.save()
        on_policy = not wanted.is_supervised and all(
            s.rollout.policy_version == self._session.version for s in samples
        )
        outcome = await self._session.update(data, wanted, self._adam(optimization))
        stats = self._auditor.read(samples, loss, outcome.outputs, outcome.metrics, on_policy=on_policy)
        if not np.isfinite([stats.loss, stats.grad_norm]).all():
            await self._session.undo()
            raise NonFiniteError(
                f"loss {stats.loss}, gradient norm {stats.grad_norm}; the step was taken back, lower lr"
            )
        return stats

    async def written(self, demonstrations: Sequence[Demonstration]) -> list[Rollout]:
        """Return written completions as rollouts.

        Raises:
            ConfigError: a row is a conversation, and there is no chat template.
        """
        text = await self._text.get()
        for one in demonstrations:
            text.encode(one.prompt)
        return [text.written(one) for one in demonstrations]

    async def reset_optimizer(self) -> None:
        """Clear the optimizer's moments; keep the weights."""
        await self._session.reset_optimizer()

    async def save(self, directory: Path) -> None:
        """Save weights and optimizer at the API, and write the saved path to disk."""
        write_state(directory, await self._session.save(), self._spec.model, self._spec.lora_rank)

    async def load(self, directory: Path) -> None:
        """Continue from a saved state, including the optimizer.

        Raises:
            RecordsError: unreadable, of another model, or the API no longer has it.
        """
        await self._session.resume(read_state(directory, self._spec.model, self._spec.lora_rank))

    async def close(self) -> None:
        """End the session."""
        await self._session.close()
        self._calls.close()

    def _adam(self, optimization: Optimization) -> Any:
        from tinker.types import AdamParams

        how = self._options
        return AdamParams(
            learning_rate=optimization.lr,
            beta1=how.beta1,
            beta2=how.beta2,
            eps=how.eps,
            weight_decay=how.weight_decay,
            grad_clip_norm=optimization.max_grad_norm,
        )

    async def _group(
        self, prompt: Prompt, sampling: Sampling, text: Text, places: asyncio.Semaphore
    ) -> Group:
        from tinker.types import ModelInput, SamplingParams

        tokens = ModelInput.from_ints(list(text.encode(prompt)))
        how = SamplingParams(
            max_tokens=sampling.max_tokens, temperature=sampling.temperature, stop=[text.end]
        )
        used: Sampler | None = None
        failures = generation = 0

        async def attempt() -> tuple[int, SampleResponse]:
            nonlocal used, generation
            used, generation = None, self._session.generation
            used = sampler = await self._session.sampler()
            return sampler.version, await self._calls.once(
                "sample", lambda: sampler.client.sample(tokens, sampling.group_size, how).result_async()
            )

        async def repair(lost: bool) -> None:
            nonlocal failures
            failures += 1
            if lost and failures == 1 and used is not None:
                await self._session.renew_sampler(used)
            elif (lost and used is None) or failures % PATIENCE == 0:
                await self._session.renew(generation)

        async with places:
            version, response = await self._calls.persist(f"sampling prompt {prompt.id}", attempt, repair)
        return Group(prompt, to_rollouts(prompt, response, sampling, version, text))


async def _all(coroutines: Sequence[Coroutine[Any, Any, Group]]) -> list[Group]:
    """Run all concurrently; if one fails, cancel the others before raising."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
