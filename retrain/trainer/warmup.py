"""Supervised steps on written completions, before the first step of reinforcement learning.

Each update lowers the mean over its completions' tokens (never the prompts') of minus their
log-probability. Rows go to warmup.jsonl, one per update; metrics.jsonl begins with step 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from retrain.backends import Backend, MaybeAwaitable, Optimization
from retrain.config.schema import Config
from retrain.demonstrations import read_demonstrations
from retrain.errors import BackendMemoryError, ConfigError, NonFiniteError
from retrain.records.clock import utc_now
from retrain.rollouts import SUPERVISED, Floats, Loss, LossTerms, Rollout, TrainingSample
from retrain.trainer.prompts import PromptStream

T = TypeVar("T")


def cross_entropy(
    logprobs: Floats, sampler_logprobs: Floats, advantages: Floats, sequence: NDArray[np.int64]
) -> LossTerms:
    """Minus the log-probability of each token; the loss that `retrain.losses` plugins look like."""
    del sampler_logprobs, sequence
    return LossTerms(-advantages * logprobs, -advantages, np.zeros(logprobs.shape, dtype=np.bool_))


LOSS = Loss(SUPERVISED, cross_entropy)


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


class WarmUp:
    """The supervised updates of one attempt."""

    def __init__(
        self,
        config: Config,
        backend: Backend,
        done: int,
        wait_for: Callable[[MaybeAwaitable[Any]], Any],
    ) -> None:
        """Read the file and give it to the backend; go on after `done` updates.

        Raises:
            ConfigError: the file changed, or the backend cannot learn from written completions.
        """
        self._backend: Any = backend  # `reset_optimizer` is optional in the protocol
        self._wait_for = wait_for
        self._config = config
        written = getattr(backend, "written", None)
        if written is None:
            raise ConfigError(
                f"[warmup].steps: the backend {config.backend.backend!r} cannot learn from written "
                "completions; use 0, or give it the methods that retrain.backends.Backend names"
            )
        rollouts: list[Rollout] = wait_for(written(read_demonstrations(config.warmup.path)))
        self._rows = PromptStream(rollouts, max(config.training.seed, 0))
        self._rows.take_positions(done * config.warmup.batch_size)  # what was learned already

    def step(self, number: int) -> WarmUpRow:
        """Take one update and give its row.

        Raises:
            NonFiniteError: the loss or gradient is not finite; weights are unchanged.
            BackendMemoryError: did not fit in memory.
        """
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
            stats = self._wait_for(self._backend.update(samples, LOSS, how))
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
        """Forget the supervised gradients' moments, whose size means nothing to the policy gradient."""
        self._wait_for(self._backend.reset_optimizer())
