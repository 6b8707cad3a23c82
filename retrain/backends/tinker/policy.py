"""One run's policy at the Tinker API.

Every call holds one of the campaign's permits from submission to result, including long polling. The
SDK's own housekeeping (a heartbeat every ten seconds, settings, telemetry) holds none.

The API computes training log-probabilities at temperature 1, so sample at temperature 1. It does its own
batching: `micro_batches` is ignored.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tinker.types import AdamParams, Datum

from retrain.backends import BackendSpec, Optimization, Sampling, UpdateStats
from retrain.backends.engines import Drawn, Ids
from retrain.backends.text import Schemas, Text, check_finite, extended, to_groups
from retrain.backends.tinker import TinkerOptions
from retrain.backends.tinker.billing import Update
from retrain.backends.tinker.calls import ApiCalls, finish
from retrain.backends.tinker.sampling import Reference, context_of, drawn
from retrain.backends.tinker.saved_states import read_state, write_state
from retrain.backends.tinker.session import Session
from retrain.backends.tinker.wire import LINEAR, ApiLoss, Auditor, Linear, api_loss, scored_by, to_datum
from retrain.backends.turns import check_turns, offer_functions, with_messages
from retrain.base.errors import ConfigError, FullContextError, NonFiniteError, RunFailedError
from retrain.base.event_loop import in_thread
from retrain.base.json_lines import Demonstration
from retrain.base.rollouts import CallForm, Floats, Group, Loss, NextTurn, Prompt, Rollout, TrainingSample
from retrain.config.files import state_of

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that tokenizers are all without PyTorch
T = TypeVar("T")


class TinkerPolicy:
    """One run's policy at the API. Use in one event loop; sampling may overlap an update."""

    def __init__(self, spec: BackendSpec, options: TinkerOptions) -> None:
        # without a seed, draw one, so that a rebuilt session gets the same adapter
        seed = spec.seed if spec.seed >= 0 else secrets.randbelow(2**31)
        self._spec = spec
        self._options = options
        self._calls = ApiCalls(spec, options)
        spec = replace(spec, seed=seed, run_name=spec.run_name or "run")
        self.session = Session(spec, self._calls)
        self._reference = Reference(spec, self.session)
        self._places = asyncio.Semaphore(options.requests_at_once)
        self._text: Text | None = None
        self._loading = asyncio.Lock()  # held while the tokenizer is loaded
        self._context: int | None = None  # tokens that the model reads; None: not known
        self._auditor = Auditor()

    @classmethod
    async def opened(cls, spec: BackendSpec, options: TinkerOptions) -> TinkerPolicy:
        """Open the session; load the tokenizer too if that needs no model."""
        backend = cls(spec, options)
        try:
            await backend.session.open()
            if options.tokenizer:
                await backend._tokenizer()
        except BaseException:
            await backend.close()
            raise
        return backend

    async def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample each prompt's group with one call; if one fails, cancel the others."""
        text = await self._tokenizer()

        async def group(prompt: Prompt, ids: Ids) -> Group:
            version, completions = await self._drawn(ids, prompt, sampling)
            return to_groups(text, [prompt], completions, sampling.group_size, version)[0]

        encoded = [(prompt, self._read(prompt, text)) for prompt in prompts]  # all, before anything is billed
        return await _all(itertools.starmap(group, encoded))

    async def check_turns(self) -> None:
        """Raise a ConfigError if the chat template does not let turns be appended."""
        check_turns(await self._tokenizer())
        self._context = await context_of(self._spec, self._calls)

    async def offer_tools(self, schemas: Schemas, *, is_extended: bool = True) -> CallForm:
        """Show functions to the policy; a ConfigError if the template does not support them."""
        form = offer_functions(await self._tokenizer(), schemas, is_extended=is_extended)
        self._context = await context_of(self._spec, self._calls)
        return form

    async def call_form(self, schemas: Schemas) -> CallForm:
        """Return how the policy writes calls of functions that a prompt shows; errors as `offer_tools`."""
        return offer_functions((await self._tokenizer()).with_variables(), schemas)

    async def extend(self, turns: Sequence[NextTurn], sampling: Sampling) -> list[Rollout | None]:
        """Sample another turn of each rollout that the context has room for, with one call each."""
        how, text = replace(sampling, group_size=1), await self._tokenizer()
        rollouts = [(with_messages(text, turn, self._context), turn.max_tokens) for turn in turns]
        return await _all(self._further(rollout, replace(how, max_tokens=most)) for rollout, most in rollouts)

    def read(self, rollout: Rollout) -> Ids:
        assert self._text is not None  # loaded to sample it
        return (*self._text.encode(rollout.prompt), *rollout.placed()[0])

    async def shown(self, tokens: Ids) -> str:
        return (await self._tokenizer()).completions([tokens])[0]

    async def update(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> UpdateStats:
        """Take one Adam step; gradient computation and step are submitted together.

        A loss that the API does not compute takes a forward pass before them.
        """
        if not samples:
            raise ValueError("samples: got none; a step without signal needs no update")
        has_more = optimization.kl_coef or optimization.entropy_bonus
        api_form, linear = None if has_more else api_loss(loss, samples), None
        if api_form is None:
            linear = await self._linearized(samples, loss, optimization)
            api_form, samples, loss = LINEAR, linear.samples, linear.loss
        data = await self._data(samples, api_form)
        if len(self.session.since) >= self._options.replay_steps:
            await self.session.save()
        on_policy = linear is not None or not api_form.is_supervised
        on_policy &= {s.rollout.policy_version for s in samples} == {self.session.version}
        outcome = await self.session.update(
            Update(data, api_form, self._adam(optimization), optimization.is_last)
        )
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
        return Linear.of(samples, loss, optimization, logprobs, reference)

    async def _data(self, samples: Sequence[TrainingSample], loss: ApiLoss) -> list[Datum]:
        text = await self._tokenizer()
        return [to_datum(text.encode(sample.rollout.prompt), sample, loss) for sample in samples]

    async def written(self, demonstrations: Sequence[Demonstration]) -> list[Rollout]:
        text = await self._tokenizer()
        for demonstration in demonstrations:
            text.encode(demonstration.prompt)
        return [text.written(demonstration) for demonstration in demonstrations]

    async def reset_optimizer(self) -> None:
        await self.session.reset_optimizer()

    async def start_from(self, adapter: str, *, is_reference: bool) -> None:
        """Continue with a saved state's weights, which become the KL term's reference instead of the base."""
        await self.session.start_from(state_of(adapter))
        if is_reference:
            self._reference.path = await self.session.save_sampler("start")

    def has_start(self) -> bool:
        return bool(self._reference.path)

    async def save(self, directory: Path) -> None:
        state = await self.session.save()
        await self._reference.extend()
        state = replace(state, reference=self._reference.path)
        write_state(directory, state, self._spec.model, self._spec.lora_rank)

    async def load(self, directory: Path) -> None:
        state = read_state(directory, self._spec.model, self._spec.lora_rank)
        self._reference.path = state.reference
        await self.session.resume(state)

    def out_s(self) -> float:
        return self._calls.outages.out_s()

    async def close(self) -> None:
        await self.session.close()

    async def _tokenizer(self) -> Text:
        """Return the tokenizer, loaded on first use."""
        options, key = self._options, "[backend.options].tokenizer"
        name = options.tokenizer or self._spec.model
        async with self._loading:
            if self._text is not None:
                return self._text
            try:
                local = in_thread(lambda: _from_files(name)) if options.tokenizer else None
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

    def _adam(self, optimization: Optimization) -> AdamParams:
        options = self._options
        return AdamParams(
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

    async def _further(self, told: Rollout, sampling: Sampling) -> Rollout | None:
        ids = self.read(told)
        if self._context is not None and len(ids) >= self._context:
            return None
        try:
            _, (one,) = await self._drawn(ids, told.prompt, sampling)
        except FullContextError:  # of a server that does not tell its context before
            return None
        check_finite([one])
        return extended(await self._tokenizer(), told, one)

    async def _drawn(self, ids: Ids, prompt: Prompt, sampling: Sampling) -> tuple[int, list[Drawn]]:
        if self._context is not None:
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, self._context - len(ids)))
        ends = (await self._tokenizer()).end_ids
        async with self._places:
            return await drawn(self.session, ids, prompt, sampling, ends)


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return what all calls return; if one fails, cancel the others."""
    running = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*running)
    finally:
        await finish(running)


def _from_files(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)  # else it may ask on the terminal
