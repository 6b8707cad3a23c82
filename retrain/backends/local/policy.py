"""The local policy: samples, learns, fits itself into memory, and is saved."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from retrain.backends import (
    BackendSpec,
    Optimization,
    Sampling,
    SamplingWork,
    UpdateStats,
    Work,
)
from retrain.backends.local.devices import (
    DeviceMemory,
    choose_device,
    choose_dtype,
    finished_s,
    is_out_of_memory,
    use_threads,
)
from retrain.backends.local.engine import EngineSampler
from retrain.backends.local.files import identity_of, save_policy
from retrain.backends.local.files import load_policy as load_files
from retrain.backends.local.loading import fitting, load_policy, load_tokenizer
from retrain.backends.local.optimizer import Optimizer
from retrain.backends.local.options import NO_REFERENCE, LocalOptions
from retrain.backends.local.rollouts import check_room, check_written, to_rollouts
from retrain.backends.local.sampling import Completed, complete
from retrain.backends.local.text import Text
from retrain.backends.local.training import MicroBatch, back_propagate, lay_out
from retrain.backends.local.trial import try_out
from retrain.backends.local.work import costs_of, info_of
from retrain.backends.objective import Totals, group_counts, scale_to_step, split_by_group
from retrain.backends.work import WorkMeter
from retrain.demonstrations import Demonstration
from retrain.engines import Drawn, Ids
from retrain.errors import BackendMemoryError, ConfigError, NonFiniteError
from retrain.rollouts import Group, Loss, Prompt, Rollout, TrainingSample

Cut = Sequence[Sequence[MicroBatch]]  # a step in parts, each in micro-batches
REMEMBERED = 10_000  # prompts whose token ids are kept: tens of megabytes at most


class LocalBackend:
    """A causal language model with its optimizer on one device."""

    def __init__(self, spec: BackendSpec, options: LocalOptions) -> None:
        device = choose_device(options.device)
        seed = spec.seed if spec.seed >= 0 else secrets.randbits(32)
        self._options = options
        dtype = choose_dtype(options.dtype, device)
        self._policy = load_policy(spec.model, spec.lora_rank, options, device, dtype, seed)
        with fitting(spec.model):
            try_out(spec.model, self._policy, device)
        tokenizer = load_tokenizer(spec.model, options)
        self._text = Text(spec.model, tokenizer, self._policy.causal, options)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._optimizer = Optimizer(self._policy.trainable(), options.weight_decay)
        self._memory = DeviceMemory(device)
        # tokens at a time; halved by what does not fit
        sampled = options.tokens_per_sampling_batch
        self._budgets = {"train": options.tokens_per_micro_batch, "sample": sampled, "evaluate": sampled}
        self._engine = EngineSampler(spec, options, self._policy) if options.engine == "openai" else None
        self._identity = identity_of(spec, options, self._policy)
        self._encoded: dict[str, Ids] = {}
        self.info = info_of(self._policy, options, device)
        self._costs = costs_of(self._policy, options)
        self._work = WorkMeter()
        use_threads(options.threads, self.info.parameters)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that leave no room for a completion; only those that might are encoded.

        Raises:
            ConfigError: names the first few of them.
        """
        around = len(self._encode(prompts[0])) if prompts else 0  # a template's tokens, and more
        # a token spells a byte or more
        long = [p for p in prompts if len(p.text.encode()) + around >= self._policy.context]
        check_room({p.id: len(self._text.encode(p)) for p in long}, self._policy.context)

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample each prompt's group, running the prompt itself once.

        Raises:
            ConfigError: a prompt fills the model's context.
            NonFiniteError: the policy's log-probabilities are not finite.
            BackendMemoryError: not even one sequence fits in memory.
        """
        if not prompts:
            return []
        ids = [self._encode(prompt) for prompt in prompts]
        check_room({p.id: len(tokens) for p, tokens in zip(prompts, ids, strict=True)}, self._policy.context)
        self._memory.begin_peak()
        generator = self._generator
        if sampling.seed is not None:
            generator = torch.Generator(generator.device).manual_seed(sampling.seed)
        if self._engine is not None:
            drawn = self._engine.complete(ids, self._text.end_ids, sampling, self._optimizer.steps, generator)
        else:
            rows = [i for i in ids for _ in range(sampling.group_size)]
            drawn = self._complete(rows, sampling, generator)
        if not all(np.isfinite(one.logprobs).all() for one in drawn):
            raise NonFiniteError(
                "the policy's log-probabilities are not finite: its weights grew without bound; lower lr"
            )
        rollouts = to_rollouts(self._text, prompts, drawn, sampling.group_size, self._optimizer.steps)
        return [Group(prompt, tuple(islice(rollouts, sampling.group_size))) for prompt in prompts]

    def update(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> UpdateStats:
        """Take one AdamW step on the summed loss of `samples`.

        What does not fit in memory is tried again in micro-batches of half as many tokens.

        Raises:
            ValueError: there are no samples.
            ConfigError: a KL term is asked for and there is no reference, as all parameters train.
            NonFiniteError: the loss or a gradient is not finite; nothing changed.
            BackendMemoryError: one sequence at a time does not fit; nothing changed.
        """
        if not samples:
            raise ValueError("samples: got none; a step without signal needs no update")
        if optimization.kl_coef and self._policy.adapters is None:
            raise ConfigError(f"[algorithm].kl_coef: {NO_REFERENCE}")
        self._memory.limit(optimization.gpu_fraction)
        self._set_checkpointing(self._options.gradient_checkpointing)
        cut = split_by_group(samples, optimization.micro_batches)
        try:
            while True:
                parts = self._lay_out(cut)
                began_s = time.perf_counter()
                try:
                    stats = self._step(parts, group_counts(cut), loss, optimization)
                    time_s = finished_s(self._generator.device) - began_s
                    batches = sum(map(len, parts))
                    is_beside = optimization.kl_coef > 0
                    return replace(stats, work=self._trained(samples, batches, time_s, is_beside))
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    reason = str(error)
                self._make_room(parts, reason)  # out here, the failed attempt's tensors are gone
        finally:
            self._optimizer.begin()
            self._set_checkpointing(False)

    def written(self, demonstrations: Sequence[Demonstration]) -> list[Rollout]:
        """Return written completions as rollouts.

        Raises:
            ConfigError: one does not fit into the model's context, or is a conversation without a template.
        """
        rollouts = [self._text.written(one) for one in demonstrations]
        for rollout in rollouts:
            check_written(rollout, len(self._encode(rollout.prompt)), self._policy.context)
        return rollouts

    def reset_optimizer(self) -> None:
        """Forget moments and step count."""
        self._optimizer.reset()

    def take_sampling_work(self) -> SamplingWork:
        """Return what sampling cost since the last call; nothing if a server samples."""
        return self._work.take()

    def save(self, directory: Path) -> None:
        """Write adapters (or the model), optimizer and random state."""
        save_policy(directory, self._policy, self._optimizer, self._generator, self._identity, self._budgets)

    def load(self, directory: Path) -> None:
        """Continue bit for bit where `save` was called.

        Raises:
            RecordsError: unreadable, or saved by another model.
        """
        self._budgets = load_files(directory, self._policy, self._optimizer, self._generator, self._identity)
        if self._engine is not None:
            self._engine.forget()

    def close(self) -> None:
        """Let go of the engine's adapters."""
        if self._engine is not None:
            self._engine.close()

    def _encode(self, prompt: Prompt) -> Ids:
        if prompt.text not in self._encoded:
            if len(self._encoded) >= REMEMBERED:
                self._encoded.clear()
            self._encoded[prompt.text] = self._text.encode(prompt)
        return self._encoded[prompt.text]

    def _complete(self, rows: Sequence[Ids], sampling: Sampling, generator: torch.Generator) -> list[Drawn]:
        """Draw a completion per row, as many rows at a time as fit."""
        budget = "sample" if sampling.seed is None else "evaluate"  # how rows are cut decides what is drawn
        length = min(max(map(len, rows)) + sampling.max_tokens, self._policy.context)
        drawn: list[Drawn] = []
        while len(drawn) < len(rows):
            count = max(1, self._budgets[budget] // length)
            if sampling.group_size < count < len(rows):
                count -= count % sampling.group_size  # whole groups: each prompt runs once
            state = generator.get_state()
            part = rows[len(drawn) : len(drawn) + count]
            try:
                completed = complete(
                    self._policy,
                    self._text,
                    part,
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    generator=generator,
                )
                drawn += completed.drawn
                self._count(part, completed)
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
            generator.set_state(state)
            self._memory.free()
            if len(part) == 1:
                raise BackendMemoryError(f"one completion did not fit in memory ({reason}); lower max_tokens")
            self._budgets[budget] = len(part) // 2 * length
        return drawn

    def _count(self, prompts: Sequence[Ids], completed: Completed) -> None:
        lengths = np.array([len(one.tokens) for one in completed.drawn])
        self._work.add(
            self._costs.prefill([len(ids) for ids in set(prompts)], 1, completed.prefill_s),
            self._costs.decode(np.array([len(ids) for ids in prompts]), lengths, completed.decode_s),
        )

    def _set_checkpointing(self, on: bool) -> None:
        # layers recompute their activations in training mode only; dropout is off in both modes
        if self._options.gradient_checkpointing:
            self._policy.causal.train(on)

    def _lay_out(self, parts: Sequence[Sequence[TrainingSample]]) -> list[list[MicroBatch]]:
        prompts = {s.rollout.prompt.text: self._encode(s.rollout.prompt) for part in parts for s in part}
        device = self._generator.device
        return [lay_out(part, prompts, self._budgets["train"], device) for part in parts]

    def _step(self, parts: Cut, counts: Sequence[int], loss: Loss, optimization: Optimization) -> UpdateStats:
        self._optimizer.begin()
        totals, squares = [], []
        for part in parts:
            for batch in part:
                totals.append(back_propagate(self._policy, batch, loss, optimization))
                self._optimizer.collect()
            if optimization.wants_moments:
                squares.append(self._optimizer.part_norm())
            self._optimizer.end_part()
        whole = self._optimizer.squared_norm()
        if not np.isfinite(whole):
            names = ", ".join(self._optimizer.non_finite()[:3])
            raise NonFiniteError(
                f"the gradient of {names} is not finite; the optimizer step was not taken, lower lr or check "
                "the rewards"
            )
        norm = float(np.sqrt(whole))
        moments = self._optimizer.moments(scale_to_step(squares, counts)) if squares else None
        self._optimizer.step(optimization.lr, norm, optimization.max_grad_norm)
        stats = Totals.sum(totals).stats(norm, moments, optimization)
        return replace(stats, memory_fraction=self._memory.peak_fraction())

    def _trained(
        self, samples: Sequence[TrainingSample], batches: int, time_s: float, reference: bool
    ) -> Work:
        drawn = sum(len(sample.rollout.tokens) for sample in samples)
        tokens = drawn + sum(len(self._encode(sample.rollout.prompt)) for sample in samples)
        work = self._costs.train(tokens, drawn, passes=batches, parts=batches, reference=reference)
        return replace(work + self._costs.optimize(), time_s=time_s)

    def _make_room(self, parts: Cut, reason: str) -> None:
        """Halve the micro-batch after a step that did not fit.

        Raises:
            BackendMemoryError: it is one sequence already.
        """
        self._optimizer.begin()
        self._memory.free()
        shapes = [batch.input_ids.shape for part in parts for batch in part]
        if all(rows == 1 for rows, _ in shapes):
            raise BackendMemoryError(
                f"one sequence of {max(length for _, length in shapes)} tokens did not fit in memory "
                f"({reason}); lower max_tokens, or set [backend.options].gradient_checkpointing = true"
            )
        self._budgets["train"] = max(rows * length for rows, length in shapes if rows > 1) // 2
