"""The supervised warm-up before the first step, with rows and checkpoints of its own."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrain.backends import Backend, Optimization
from retrain.base.clock import utc_now
from retrain.base.errors import BackendMemoryError, NonFiniteError
from retrain.base.json_lines import read_demonstrations
from retrain.base.rollouts import SUPERVISED, Floats, Loss, LossTerms, Rollout, TrainingSample
from retrain.config.schema import Config
from retrain.control.rules import StateDict
from retrain.plugins.curricula.epochs import Epochs
from retrain.records.metrics import MetricsWriter
from retrain.records.row_parts import Value, columns
from retrain.trainer.budget import Budget
from retrain.trainer.journal import Journal
from retrain.trainer.part import Loop, Part, is_due


def cross_entropy(
    logprobs: Floats, sampler_logprobs: Floats, advantages: Floats, sequence: NDArray[np.int64]
) -> LossTerms:
    """Return each token's negative log-probability, as a loss plugin would (see `retrain.plugins.losses`)."""
    return LossTerms(-advantages * logprobs, -advantages, np.zeros(logprobs.shape, dtype=np.bool_))


WARM_UP_LOSS = Loss(SUPERVISED, cross_entropy)


class WarmUp(Part):
    """Warms the policy up on demonstrations; the end is the checkpoint of step 0, with a fresh optimizer.

    The loss is the mean cross-entropy over the completions' tokens; prompts are not trained on. Each update
    is a row of warmup.jsonl; metrics.jsonl begins with step 1.
    """

    name = "warmup"

    def __init__(
        self, config: Config, file: Path, backend: Backend, journal: Journal, budget: Budget
    ) -> None:
        self._table, self._training = config.warmup, config.training
        self._file, self._backend, self._journal, self._budget = file, backend, journal, budget
        self._updates = 0  # complete ones

    def begin(self, loop: Loop) -> None:
        """Take the updates that no earlier attempt took.

        Raises:
            ConfigError: the file changed, or the backend cannot train on given completions.
        """
        steps = self._table.steps
        if self._updates >= steps or loop.step > 0:
            return
        rollouts = self._backend.written(read_demonstrations(self._table.path))
        epochs = Epochs(len(rollouts), max(self._training.seed, 0))
        epochs.choose(self._updates * self._table.batch_size)  # of an earlier attempt
        with MetricsWriter(self._file, self._journal.attempt) as rows:
            while self._updates < steps:
                loop.before_step()
                self._journal.phase(f"warm-up {self._updates + 1} of {steps}", 0)
                row = self._update([rollouts[n] for n in epochs.choose(self._table.batch_size)])
                self._budget.took_step()
                rows.append(row | columns(self._budget.ledger.take()))
                self._updates += 1
                loop.changed()
                if self._updates < steps and is_due(self._training.save_every, self._updates):
                    rows.sync()
                    loop.save()
            rows.sync()
        self._backend.reset_optimizer()  # moments of supervised gradients do not fit the policy gradient
        loop.save()

    def _update(self, rollouts: list[Rollout]) -> dict[str, Value]:
        """Take the next supervised update; return its row, with units as in metrics.jsonl."""
        number, started = self._updates + 1, time.perf_counter()
        tokens = sum(len(rollout.tokens) for rollout in rollouts)
        samples = [
            TrainingSample(rollout, np.ones(len(rollout.tokens)), 1.0 / tokens, group)
            for group, rollout in enumerate(rollouts)
        ]
        lr = self._table.lr or self._training.lr
        try:
            stats = self._backend.update(
                samples, WARM_UP_LOSS, Optimization(lr, self._training.max_grad_norm)
            )
        except BackendMemoryError as error:
            raise BackendMemoryError(f"warm-up {number}: {error}; or lower [warmup].batch_size") from error
        if not np.all(np.isfinite([stats.loss, stats.grad_norm])):
            raise NonFiniteError(f"warm-up {number}: loss {stats.loss}, gradient norm {stats.grad_norm}")
        return {
            "step": number,
            "timestamp": utc_now(),
            "step_time_s": time.perf_counter() - started,
            "loss": stats.loss,
            "lr": lr,
            "grad_norm": stats.grad_norm,
            "tokens_per_step": tokens,
        }

    def state_dict(self) -> StateDict:
        return {"updates": self._updates}

    def load_state_dict(self, state: StateDict) -> None:
        self._updates = state["updates"]
