"""Supervised updates on demonstrations before the first step of reinforcement learning.

The loss is the mean cross-entropy over the completions' tokens; prompts are not trained on. Each update
is a row of warmup.jsonl; metrics.jsonl begins with step 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrain.backends import Backend, MaybeAwaitable, Optimization
from retrain.clock import utc_now
from retrain.config.schema import Config
from retrain.demonstrations import read_demonstrations
from retrain.errors import BackendMemoryError, ConfigError, NonFiniteError
from retrain.rollouts import SUPERVISED, Floats, Loss, LossTerms, Rollout, TrainingSample
from retrain.trainer.source import PromptStream


def cross_entropy(
    logprobs: Floats, sampler_logprobs: Floats, advantages: Floats, sequence: NDArray[np.int64]
) -> LossTerms:
    """Return each token's negative log-probability, as a loss plugin would (see `retrain.losses`)."""
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


class WarmUpUpdates:
    """The supervised updates of one attempt."""

    def __init__(
        self, config: Config, backend: Backend, done: int, wait_for: Callable[[MaybeAwaitable[Any]], Any]
    ) -> None:
        """Read the demonstrations and tokenize them with the backend; continue after `done` updates.

        Raises:
            ConfigError: the file changed, or the backend cannot train on given completions.
        """
        self._backend: Any = backend  # `reset_optimizer` is optional in the protocol
        self._wait_for = wait_for
        self._config = config
        written = getattr(backend, "written", None)
        if written is None:
            raise ConfigError(
                f"[warmup].steps: backend {config.backend.backend!r} cannot train on given completions; "
                "use 0, or implement `written` and `reset_optimizer` of retrain.backends.Backend"
            )
        rollouts: list[Rollout] = wait_for(written(read_demonstrations(config.warmup.path)))
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
        """Reset the optimizer: the moments of supervised gradients do not fit the policy gradient."""
        self._wait_for(self._backend.reset_optimizer())
