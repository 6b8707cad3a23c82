"""Takes the optimizer steps of a batch: one or several passes, each over all of its minibatches.

A minibatch has whole groups, in an order that is drawn anew for each pass. Its token weights are those of the
batch times the number of minibatches, so that the mean of their losses is the loss of the batch. Importance
ratios are to the sampler's policy throughout. The learning rate is the same for all steps of a batch, and
gradients are clipped at each of them. The gradient noise scale is measured by the first one.

Before the first step of reinforcement learning, supervised updates on demonstrations may warm the policy up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrain.backends import Backend, Optimization, UpdateStats
from retrain.backends.metering import NOTHING, tally
from retrain.backends.objective import split_by_group
from retrain.base.clock import utc_now
from retrain.base.errors import BackendMemoryError, InfrastructureError, NonFiniteError
from retrain.base.json_lines import read_demonstrations
from retrain.base.rollouts import SUPERVISED, Floats, Loss, LossTerms, TrainingSample
from retrain.config.schema import Config
from retrain.records.spending import Tokens
from retrain.records.step_row import UpdateSummary
from retrain.trainer.prompt_stream import PromptStream
from retrain.trainer.step import StepSize

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
        how = self._optimization(size)
        planned = list(self._minibatches(samples, step))
        stats: list[UpdateStats] = []
        for number, minibatch in enumerate(planned, 1):
            is_first, is_last = number == 1, number == len(planned)
            own = replace(how, wants_moments=how.wants_moments and is_first, is_last=is_last)
            with tally() as billed:
                found = self._step(minibatch, own)
            self.billed += billed.tokens
            if not np.all(np.isfinite([found.loss, found.grad_norm])):
                raise NonFiniteError(f"step {step}: loss {found.loss}, gradient norm {found.grad_norm}")
            stats.append(found)
            self._taken = number
        return combined(stats, [sum(len(s.rollout.tokens) for s in part) for part in planned])

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

    def _minibatches(self, samples: Sequence[TrainingSample], step: int) -> Iterator[list[TrainingSample]]:
        training = self._training
        for number in range(training.updates_per_batch):
            seed = [training.seed, step, number, SHUFFLING]
            yield from minibatches_of(samples, training.minibatches, seed)

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

    def _optimization(self, size: StepSize) -> Optimization:
        return Optimization(
            lr=self._training.lr * size.lr_factor,
            max_grad_norm=self._training.max_grad_norm,
            entropy_bonus=self._training.entropy_bonus,
            kl_coef=self.config.algorithm.kl_coef,
            micro_batches=size.parts,
            temperature=self._training.temperature,
            gpu_fraction=size.gpu_fraction,
            wants_moments=size.wants_moments,
        )


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
    return [[_weighted(sample, len(parts)) for sample in part] for part in parts]


def _weighted(sample: TrainingSample, factor: int) -> TrainingSample:
    bonus = sample.entropy_weight
    return replace(
        sample,
        token_weight=factor * sample.token_weight,
        entropy_weight=None if bonus is None else factor * bonus,
    )


def combined(stats: Sequence[UpdateStats], tokens: Sequence[int]) -> UpdateStats:
    """Return the statistics of a batch from those of its updates, each on so many tokens."""
    if len(stats) == 1:
        return stats[0]

    def known(name: str) -> list[Any]:
        return [value for one in stats if (value := getattr(one, name)) is not None]

    def mean(name: str) -> float:
        return float(np.average([getattr(one, name) for one in stats], weights=tokens))

    def mean_if_known(name: str) -> float | None:
        return mean(name) if len(known(name)) == len(stats) else None

    work = known("work")
    return UpdateStats(
        loss=math.fsum(one.loss for one in stats) / len(stats),
        grad_norm=math.fsum(one.grad_norm for one in stats) / len(stats),
        entropy=mean("entropy"),
        clip_fraction=mean("clip_fraction"),
        moments=stats[0].moments,
        reference_kl=mean_if_known("reference_kl"),
        approx_kl=mean_if_known("approx_kl"),
        mismatch=stats[0].mismatch,
        memory_fraction=max(known("memory_fraction"), default=None),
        work=reduce(add, work) if work else None,
    )


def cross_entropy(
    logprobs: Floats, sampler_logprobs: Floats, advantages: Floats, sequence: NDArray[np.int64]
) -> LossTerms:
    """Return each token's negative log-probability, as a loss plugin would (see `retrain.plugins.losses`)."""
    return LossTerms(-advantages * logprobs, -advantages, np.zeros(logprobs.shape, dtype=np.bool_))


WARM_UP_LOSS = Loss(SUPERVISED, cross_entropy)


@dataclass(frozen=True, slots=True)
class WarmUpRow:
    """A row of warmup.jsonl; units as in metrics.jsonl."""

    step: int  # number of the supervised update, from 1
    timestamp: str
    step_time_s: float
    loss: float
    lr: float
    grad_norm: float
    tokens_per_step: int


class WarmUpUpdates:
    """The supervised updates of one attempt.

    The loss is the mean cross-entropy over the completions' tokens; prompts are not trained on. Each update
    is a row of warmup.jsonl; metrics.jsonl begins with step 1.
    """

    def __init__(self, config: Config, backend: Backend, done: int) -> None:
        """Read the demonstrations and tokenize them with the backend; continue after `done` updates.

        Raises:
            ConfigError: the file changed, or the backend cannot train on given completions.
        """
        self._backend, self._config = backend, config
        rollouts = backend.written(read_demonstrations(config.warmup.path))
        self._rows = PromptStream(rollouts, max(config.training.seed, 0))
        self._rows.take_positions(done * config.warmup.batch_size)  # updates of an earlier attempt

    def step(self, number: int) -> WarmUpRow:
        """Take one update and return its row."""
        started = time.perf_counter()
        chosen = self._rows.take(self._config.warmup.batch_size)
        tokens = sum(len(rollout.tokens) for rollout in chosen)
        samples = [
            TrainingSample(rollout, np.ones(len(rollout.tokens)), 1.0 / tokens, group)
            for group, rollout in enumerate(chosen)
        ]
        lr = self._config.warmup.lr or self._config.training.lr
        how = Optimization(lr, self._config.training.max_grad_norm)
        try:
            stats = self._backend.update(samples, WARM_UP_LOSS, how)
        except BackendMemoryError as error:
            raise BackendMemoryError(f"warm-up {number}: {error}; or lower [warmup].batch_size") from error
        if not np.all(np.isfinite([stats.loss, stats.grad_norm])):
            raise NonFiniteError(f"warm-up {number}: loss {stats.loss}, gradient norm {stats.grad_norm}")
        return WarmUpRow(
            step=number,
            timestamp=utc_now(),
            step_time_s=time.perf_counter() - started,
            loss=stats.loss,
            lr=lr,
            grad_norm=stats.grad_norm,
            tokens_per_step=tokens,
        )

    def finish(self) -> None:
        """Reset the optimizer: the moments of supervised gradients do not fit the policy gradient."""
        self._backend.reset_optimizer()
