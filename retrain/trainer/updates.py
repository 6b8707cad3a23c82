"""Takes the optimizer steps of a batch: one or several passes, each over all of its minibatches.

A minibatch has whole groups, in an order that is drawn anew for each pass. Its token weights are those of the
batch times the number of minibatches, so that the mean of their losses is the loss of the batch. Importance
ratios are to the sampler's policy throughout. The learning rate is the same for all steps of a batch, and
gradients are clipped at each of them. The gradient noise scale is measured by the first one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from retrain.backends import Backend, Optimization, UpdateStats
from retrain.backends.metering import NOTHING, tally
from retrain.backends.objective import split_by_group
from retrain.base.errors import BackendMemoryError, InfrastructureError, NonFiniteError
from retrain.base.rollouts import Loss, TrainingSample
from retrain.config.schema import Config
from retrain.records.spending import Tokens
from retrain.records.step_row import UpdateSummary
from retrain.trainer.part import StepSize

NO_UPDATE = UpdateStats(loss=0.0, grad_norm=0.0, entropy=0.0, clip_fraction=0.0, approx_kl=0.0)
SHUFFLING = 0x6D696E69  # names the stream of random numbers, beside the run's others


@dataclass(eq=False)
class Updates:
    """The optimizer steps of one attempt."""

    config: Config
    backend: Backend
    loss: Loss
    billed: Tokens = field(default=NOTHING, init=False)  # of the latest batch
    _taken: int = field(default=0, init=False)  # optimizer steps of it

    def __post_init__(self) -> None:
        self._training = self.config.training
        self._are_several = self._training.updates_per_batch * self._training.minibatches > 1

    def take(self, samples: Sequence[TrainingSample], size: StepSize, step: int) -> UpdateStats:
        """Take all optimizer steps of a batch, none if it has no samples; return their statistics.

        Raises:
            NonFiniteError: a loss or gradient is not finite.
            BackendMemoryError: the first step did not fit in memory; the policy is unchanged.
            InfrastructureError: a later one did not, even with the groups one after the other.
        """
        self._taken, self.billed = 0, NOTHING
        if not samples:
            return NO_UPDATE
        training = self._training
        minibatches = [
            minibatch
            for number in range(training.updates_per_batch)
            for minibatch in minibatches_of(
                samples, training.minibatches, [training.seed, step, number, SHUFFLING]
            )
        ]
        all_stats: list[UpdateStats] = []
        for number, minibatch in enumerate(minibatches, 1):
            how = Optimization(
                lr=training.lr * size.lr_factor,
                max_grad_norm=training.max_grad_norm,
                entropy_bonus=training.entropy_bonus,
                kl_coef=self.config.algorithm.kl_coef,
                micro_batches=size.parts,
                temperature=training.temperature,
                gpu_fraction=size.gpu_fraction,
                wants_moments=size.wants_moments and number == 1,
                is_last=number == len(minibatches),
            )
            with tally() as billed:
                stats = self._step(minibatch, how)
            self.billed += billed.tokens
            if not np.all(np.isfinite([stats.loss, stats.grad_norm])):
                raise NonFiniteError(f"step {step}: loss {stats.loss}, gradient norm {stats.grad_norm}")
            all_stats.append(stats)
            self._taken = number
        return combined(all_stats, [sum(len(s.rollout.tokens) for s in part) for part in minibatches])

    def summary(self, stats: UpdateStats, lr: float, entropy: float | None) -> UpdateSummary:
        """Return the latest batch's part of its step's row; `entropy` is that of its tokens as sampled."""
        return UpdateSummary(
            updates=self._taken,
            loss=stats.loss,
            lr=lr,
            grad_norm=stats.grad_norm,
            clip_fraction=stats.clip_fraction,
            approx_kl=stats.approx_kl,
            entropy=entropy,
            update_entropy=stats.entropy if self._are_several else None,
            reference_kl=stats.reference_kl,
        )

    def _step(self, minibatch: Sequence[TrainingSample], how: Optimization) -> UpdateStats:
        """Take one step; a later one of a batch in ever smaller parts until it fits in memory."""
        groups = len({sample.group for sample in minibatch})
        while True:
            try:
                return self.backend.update(minibatch, self.loss, how)
            except BackendMemoryError as error:
                if not self._taken:
                    raise
                if how.micro_batches >= groups:
                    raise InfrastructureError(f"update {self._taken + 1} of a batch: {error}") from error
                how = replace(how, micro_batches=2 * how.micro_batches)


def minibatches_of(
    samples: Sequence[TrainingSample], count: int, seed: Sequence[int]
) -> list[list[TrainingSample]]:
    """Return a batch's groups, shuffled and cut into at most `count` minibatches of nearly equal numbers.

    One minibatch is the batch as it is, in its order.
    """
    groups = list(dict.fromkeys(sample.group for sample in samples))
    if min(count, len(groups)) == 1:
        return [list(samples)]
    places = dict(
        zip(np.random.default_rng(seed).permutation(groups).tolist(), range(len(groups)), strict=True)
    )
    parts = split_by_group(sorted(samples, key=lambda sample: places[sample.group]), count)

    def weighted(sample: TrainingSample) -> TrainingSample:
        bonus = sample.entropy_weight
        return replace(
            sample,
            token_weight=len(parts) * sample.token_weight,
            entropy_weight=None if bonus is None else len(parts) * bonus,
        )

    return [[weighted(sample) for sample in part] for part in parts]


def combined(stats: Sequence[UpdateStats], tokens: Sequence[int]) -> UpdateStats:
    """Return the statistics of a batch from those of its updates, each on so many tokens."""
    if len(stats) == 1:
        return stats[0]

    def values(name: str) -> list[Any]:
        return [value for update in stats if (value := getattr(update, name)) is not None]

    def mean(name: str) -> float:
        return float(np.average([getattr(update, name) for update in stats], weights=tokens))

    def mean_if_known(name: str) -> float | None:
        return mean(name) if len(values(name)) == len(stats) else None

    work = values("work")
    return UpdateStats(
        loss=math.fsum(update.loss for update in stats) / len(stats),
        grad_norm=math.fsum(update.grad_norm for update in stats) / len(stats),
        entropy=mean("entropy"),
        clip_fraction=mean("clip_fraction"),
        moments=stats[0].moments,
        reference_kl=mean_if_known("reference_kl"),
        approx_kl=mean_if_known("approx_kl"),
        mismatch=stats[0].mismatch,
        teacher_agreement=mean_if_known("teacher_agreement"),
        memory_fraction=max(values("memory_fraction"), default=None),
        work=reduce(add, work) if work else None,
    )
