"""Optimizer steps in micro-batches that fit in memory, with the loss's gradient by autograd.

Losses are numpy functions that return value and slope per token; `sum(weight * slope * logprob)` with
constant slopes has exactly the loss's gradient, so every loss runs on every device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from retrain.backends import Optimization, TrainingProgress, UpdateStats, ignore_progress
from retrain.backends.engines import Ids
from retrain.backends.local.devices import DeviceMemory, finished_s, is_out_of_memory
from retrain.backends.local.loading import Policy
from retrain.backends.local.micro_batches import MicroBatch, lay_out, states_of
from retrain.backends.local.next_token import entropy
from retrain.backends.local.optimizer import Optimizer
from retrain.backends.objective import Totals, split_by_group
from retrain.backends.work import ModelCosts
from retrain.base.errors import BackendMemoryError, NonFiniteError
from retrain.base.rollouts import Floats, Loss, Prompt, TrainingSample


@dataclass(slots=True, eq=False)
class Learner:
    """Takes optimizer steps, and remembers the micro-batch size in tokens that fits."""

    policy: Policy
    optimizer: Optimizer
    dropout: Dropout
    memory: DeviceMemory
    costs: ModelCosts
    tokens_at_a_time: int
    checkpointing: bool  # recompute activations
    most_shared: int = 0  # longest sequence of which the prompt can be shared
    observe: Callable[[TrainingProgress], None] = ignore_progress

    def update(
        self,
        samples: Sequence[TrainingSample],
        prompts: Mapping[Prompt, Ids],
        loss: Loss,
        optimization: Optimization,
    ) -> UpdateStats:
        """Take one step; if it does not fit in memory, retry with half as many tokens per micro-batch."""
        cut, device = split_by_group(samples, optimization.micro_batches), self.policy.device
        # recomputed layers know no layout, and dropout is drawn for each completion's own prompt
        shared = 0 if self.checkpointing or self.dropout.is_on else self.most_shared
        self._set_checkpointing(on=self.checkpointing)
        try:
            while True:
                parts = [lay_out(p, prompts, self.tokens_at_a_time, self.policy, shared) for p in cut]
                began_s = time.perf_counter()
                try:
                    stats = self._step(parts, cut, loss, optimization)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    reason = str(error)
                else:
                    time_s = finished_s(device) - began_s
                    drawn = sum(len(sample.rollout.tokens) for sample in samples)
                    tokens = sum(batch.tokens for part in parts for batch in part)
                    passes, reference = sum(map(len, parts)), optimization.kl_coef > 0
                    work = self.costs.train(tokens, drawn, passes, parts=passes, reference=reference)
                    return replace(stats, work=replace(work + self.costs.optimize(), time_s=time_s))
                self._make_room(parts, reason)  # after `except`, which frees the failed attempt's tensors
        finally:
            self.optimizer.begin()
            self._set_checkpointing(on=False)

    def _set_checkpointing(self, *, on: bool) -> None:
        # activations are recomputed in training mode only, in which other layers may add noise
        for layer in self.policy.causal.modules() if self.checkpointing else ():
            if hasattr(layer, "gradient_checkpointing"):
                layer.training = on

    def _step(
        self,
        parts: Sequence[Sequence[MicroBatch]],
        cut: Sequence[Sequence[TrainingSample]],
        loss: Loss,
        optimization: Optimization,
    ) -> UpdateStats:
        self.optimizer.begin()
        totals: list[Totals] = []
        squares, whole = [], sum(map(len, parts))
        for part in parts:
            for batch in part:
                with self.dropout.masks(self.optimizer.steps, len(totals)):
                    totals.append(back_propagate(self.policy, batch, loss, optimization))
                self.optimizer.collect()
                self.observe(TrainingProgress(whole, len(totals)))
            if optimization.wants_moments:
                squares.append(self.optimizer.part_norm())
            self.optimizer.end_part()
        norm, moments = self.optimizer.step(optimization.lr, optimization.max_grad_norm, squares, cut)
        stats = Totals.sum(totals).stats(norm, moments, optimization)
        return replace(stats, memory_fraction=self.memory.peak_fraction())

    def _make_room(self, parts: Sequence[Sequence[MicroBatch]], reason: str) -> None:
        """Halve the micro-batch after a step that did not fit; a single sequence cannot be halved."""
        self.optimizer.begin()
        self.memory.free()
        batches = [*chain.from_iterable(parts)]
        longest = max(batch.input_ids.numel() for batch in batches)
        if all(batch.sequences == 1 for batch in batches):
            raise BackendMemoryError(
                f"one sequence of {longest} tokens did not fit in memory "
                f"({reason}); lower max_tokens, or set [backend.options].gradient_checkpointing = true"
            )
        self.tokens_at_a_time = max(b.input_ids.numel() for b in batches if b.sequences > 1) // 2


def back_propagate(policy: Policy, batch: MicroBatch, loss: Loss, optimization: Optimization) -> Totals:
    """Add the gradient of a micro-batch's weighted loss to that of the parameters, if the loss is finite."""
    reference = _reference(policy, batch, optimization.temperature) if optimization.kl_coef else None
    bonus = optimization.entropy_bonus
    logprobs, entropies = evaluate(policy, batch, optimization.temperature, entropy_gradient=bonus > 0)
    terms, totals = batch.data.evaluate(
        loss, _to_numpy(logprobs), _to_numpy(entropies), reference, optimization
    )
    if not np.isfinite(totals.loss):
        raise NonFiniteError(
            f"the loss is {totals.loss}; the optimizer step was not taken, lower lr or check the rewards"
        )
    surrogate = torch.dot(_like(batch.data.weights * terms.slope, logprobs), logprobs)
    if bonus:
        surrogate = surrogate - bonus * torch.dot(_like(batch.data.bonus_weights, entropies), entropies)
    torch.autograd.backward([surrogate])
    return totals


def evaluate(
    policy: Policy,
    batch: MicroBatch,
    temperature: float,
    *,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probability and entropy (nats) of a micro-batch's completion tokens, (tokens,) in float32.

    Padding is on the right and attention is causal, so no mask is needed. Logits, (tokens, vocabulary), are
    computed in chunks of tokens; with gradients, those of several chunks are recomputed in the backward pass.

    Args:
        entropy_gradient: also propagate gradients through the entropies.
    """

    def score(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logp = policy.log_distribution(hidden, temperature)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies = entropy(logp)
        return logp.gather(1, targets[:, None])[:, 0], entropies

    if batch.layout is None:
        states = policy.body(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    else:
        states = states_of(policy, batch.input_ids, batch.layout)
    hidden = states.flatten(0, 1)[batch.sources]
    size = policy.rows_at_a_time
    if len(batch.targets) <= size:
        return score(hidden, batch.targets)
    pairs = zip(hidden.split(size), batch.targets.split(size), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(score, *pair, use_reentrant=False) for pair in pairs]  # a head may have dropout
    else:
        parts = [score(*pair) for pair in pairs]
    logprobs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, entropies


def _reference(policy: Policy, batch: MicroBatch, temperature: float) -> Floats:
    with policy.as_reference():
        return _to_numpy(evaluate(policy, batch, temperature)[0])


def _to_numpy(tensor: torch.Tensor) -> Floats:
    array: Floats = tensor.detach().double().cpu().numpy()
    return array


def _like(values: Floats, tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=tensor.dtype, device=tensor.device)


class Dropout:
    """The dropout layers of a policy's adapters, which are off outside of `masks`."""

    def __init__(self, policy: Policy, seed: int) -> None:
        modules = policy.adapters.modules() if policy.adapters is not None else ()
        self._layers = [layer for layer in modules if isinstance(layer, torch.nn.Dropout) and layer.p > 0]
        self._seed = seed
        device = policy.device
        self._devices = [device] if device.type == "cuda" else []

    @property
    def is_on(self) -> bool:
        """Whether adapters have dropout at all."""
        return bool(self._layers)

    @contextmanager
    def masks(self, step: int, micro_batch: int) -> Iterator[None]:
        """Switch dropout on for a micro-batch; its masks depend on the seed and these two numbers alone."""
        if not self._layers:
            yield
            return
        words = np.random.SeedSequence([self._seed, step, micro_batch]).generate_state(1, np.uint64)
        with torch.random.fork_rng(devices=self._devices):
            torch.manual_seed(int(words[0]))
            self._switch(on=True)
            try:
                yield
            finally:
                self._switch(on=False)

    def _switch(self, *, on: bool) -> None:
        for layer in self._layers:
            layer.train(on)
