"""Optimizer steps of the local policy in micro-batches that fit in memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from retrain.backends import Optimization, UpdateStats, Work
from retrain.backends.local import LocalOptions
from retrain.backends.local.devices import DeviceMemory, finished_s, is_out_of_memory
from retrain.backends.local.loading import Policy
from retrain.backends.local.optimizer import Optimizer
from retrain.backends.local.training import MicroBatch, back_propagate, lay_out
from retrain.backends.objective import Totals, split_by_group
from retrain.backends.work import ModelCosts
from retrain.engines import Ids
from retrain.errors import BackendMemoryError, NonFiniteError
from retrain.rollouts import Loss, TrainingSample


class Learner:
    """Takes optimizer steps, and remembers the micro-batch size in tokens that fits."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        memory: DeviceMemory,
        costs: ModelCosts,
        options: LocalOptions,
    ) -> None:
        self._policy = policy
        self._optimizer = optimizer
        self._memory = memory
        self._costs = costs
        self._checkpointing = options.gradient_checkpointing
        self.tokens_at_a_time = options.tokens_per_micro_batch

    def update(
        self,
        samples: Sequence[TrainingSample],
        prompts: Mapping[str, Ids],
        loss: Loss,
        optimization: Optimization,
    ) -> UpdateStats:
        """Take one step; on out-of-memory, retry with half as many tokens per micro-batch.

        Args:
            samples: at least one.
            prompts: token ids by prompt text.
            loss: the run's loss.
            optimization: settings of the step.

        Raises:
            NonFiniteError: the loss or a gradient is not finite; nothing changed.
            BackendMemoryError: a single sequence does not fit; nothing changed.
        """
        cut, device = split_by_group(samples, optimization.micro_batches), self._policy.causal.device
        self._set_checkpointing(self._checkpointing)
        try:
            while True:
                parts = [lay_out(part, prompts, self.tokens_at_a_time, device) for part in cut]
                began_s = time.perf_counter()
                try:
                    stats = self._step(parts, cut, loss, optimization)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    reason = str(error)
                else:
                    time_s = finished_s(device) - began_s
                    work = self._work(samples, prompts, sum(map(len, parts)), optimization.kl_coef > 0)
                    return replace(stats, work=replace(work, time_s=time_s))
                self._make_room(parts, reason)  # after `except`, which frees the failed attempt's tensors
        finally:
            self._optimizer.begin()
            self._set_checkpointing(False)

    def _set_checkpointing(self, on: bool) -> None:
        # activations are recomputed in training mode only; dropout is off in both modes
        if self._checkpointing:
            self._policy.causal.train(on)

    def _step(
        self,
        parts: Sequence[Sequence[MicroBatch]],
        cut: Sequence[Sequence[TrainingSample]],
        loss: Loss,
        optimization: Optimization,
    ) -> UpdateStats:
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
        moments = self._optimizer.moments(squares, cut) if squares else None
        self._optimizer.step(optimization.lr, norm, optimization.max_grad_norm)
        stats = Totals.sum(totals).stats(norm, moments, optimization)
        return replace(stats, memory_fraction=self._memory.peak_fraction())

    def _work(
        self,
        samples: Sequence[TrainingSample],
        prompts: Mapping[str, Ids],
        batches: int,
        reference: bool,
    ) -> Work:
        drawn = sum(len(sample.rollout.tokens) for sample in samples)
        tokens = drawn + sum(len(prompts[sample.rollout.prompt.text]) for sample in samples)
        work = self._costs.train(tokens, drawn, passes=batches, parts=batches, reference=reference)
        return work + self._costs.optimize()

    def _make_room(self, parts: Sequence[Sequence[MicroBatch]], reason: str) -> None:
        """Halve the micro-batch after a step that did not fit.

        Raises:
            BackendMemoryError: it is already a single sequence.
        """
        self._optimizer.begin()
        self._memory.free()
        shapes = [batch.input_ids.shape for part in parts for batch in part]
        if all(rows == 1 for rows, _ in shapes):
            raise BackendMemoryError(
                f"one sequence of {max(length for _, length in shapes)} tokens did not fit in memory "
                f"({reason}); lower max_tokens, or set [backend.options].gradient_checkpointing = true"
            )
        self.tokens_at_a_time = max(rows * length for rows, length in shapes if rows > 1) // 2
