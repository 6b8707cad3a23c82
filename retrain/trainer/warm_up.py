"""The supervised warm-up before the first step, with rows and checkpoints of its own."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrain.backends import Optimization
from retrain.base.clock import utc_now
from retrain.base.errors import BackendMemoryError, InfrastructureError, NonFiniteError, RecordsError
from retrain.base.json_lines import read_demonstrations
from retrain.base.rollouts import SUPERVISED, Floats, Loss, LossTerms, Rollout, TrainingSample
from retrain.config.digest import warm_up_digest
from retrain.control.rules import StateDict
from retrain.plugins.curricula.epochs import Epochs
from retrain.records.files import make_directory, read_json, readable, remove_file, set_aside, write_json
from retrain.records.metrics import MetricsWriter, stream_rows
from retrain.records.row_parts import Value, columns
from retrain.records.run_state import WAITS_FOR_RUN
from retrain.records.spending import COUNTS
from retrain.trainer import checkpoint
from retrain.trainer.budget import Budget
from retrain.trainer.loop import OpenRun
from retrain.trainer.part import Loop, Part, is_due
from retrain.trainer.starts import made_once


def cross_entropy(
    logprobs: Floats, sampler_logprobs: Floats, advantages: Floats, sequence: NDArray[np.int64]
) -> LossTerms:
    """Return each token's negative log-probability, as a loss plugin would (see `retrain.plugins.losses`)."""
    return LossTerms(-advantages * logprobs, -advantages, np.zeros(logprobs.shape, dtype=np.bool_))


MAKER = "maker.json"  # in the shared directory: the run that trains, for messages
MAKERS = ("attempt", "step_time_s", "cost_usd", *COUNTS)  # columns of a row that are its maker's alone
WARM_UP_LOSS = Loss(SUPERVISED, cross_entropy)


class WarmUp(Part):
    """Warms the policy up on demonstrations; the end is the checkpoint of step 0, with a fresh optimizer.

    The loss is the mean cross-entropy over the completions' tokens; prompts are not trained on. Each update
    is a row of warmup.jsonl; metrics.jsonl begins with step 1.

    Of a campaign's runs with the same policy after it, the first to get there trains it, and the others wait
    and load it. It is a checkpoint in the campaign's directory, with those rows.
    """

    name = "warmup"

    def __init__(self, run: OpenRun, budget: Budget) -> None:
        self._run, self._table, self._training = run, run.config.warmup, run.config.training
        self._file, self._backend, self._journal = run.files.warmup, run.backend, run.journal
        self._budget = budget
        self._updates = 0  # complete ones
        self._run_id = run.config.run.run_id if run.config.run else ""

    def begin(self, loop: Loop) -> None:
        """Load what another run has trained, or take the updates that no earlier attempt took.

        Raises:
            ConfigError: the file changed, or the backend cannot train on given completions.
            InfrastructureError: what another run has trained cannot be loaded, and is put out of the way.
        """
        if self._updates >= self._table.steps or loop.step > 0:
            return
        own, runs, seed = self._run.files.directory, self._run.campaign.runs, self._training.seed
        is_alone = seed < 0 or own.parent != runs  # a negative seed differs from run to run
        if not is_alone and any(run != own for run in runs.glob(f"*_s{seed}")):
            self._begin_together(loop)
        else:
            self._train(loop)
        loop.save()

    def _begin_together(self, loop: Loop) -> None:
        """Train what all runs of this seed share, or wait until another one has."""
        shared = self._run.campaign.warm_ups / warm_up_digest(self._run.config)
        make_directory(shared)
        lock, stop = shared.with_suffix(".lock"), self._run.stop

        def waiting() -> None:
            maker = readable(read_json, shared / MAKER) or {}
            self._journal.phase(f"{WAITS_FOR_RUN} the warm-up of {maker.get('run', 'another run')}", 0)

        def save(directory: Path) -> None:
            self._backend.save(directory)
            shutil.copyfile(self._file, directory / self._file.name)

        with made_once(lock, lambda: checkpoint.newest(shared), stop, waiting) as start:
            if start is not None:
                self._take(loop, start)
            elif stop.is_set():
                loop.leave()
            else:
                write_json(shared / MAKER, {"run": self._run_id})
                self._train(loop)
                checkpoint.save(shared, 0, {self.name: {"run": self._run_id}}, save, keep=1)

    def _take(self, loop: Loop, start: checkpoint.Checkpoint) -> None:
        """Continue with the policy that another run trained, and its rows without what they took and cost."""
        maker = str(start.state[self.name]["run"])
        try:
            self._backend.load(start.directory)
        except RecordsError as error:
            aside = set_aside(start.directory)
            what = (
                f"the warm-up of {maker} cannot be loaded and was moved to {aside}; another attempt trains it"
            )
            raise InfrastructureError(f"{what}: {error}") from error
        if maker != self._run_id:  # else it was killed before it wrote a checkpoint of its own
            remove_file(self._file)
            with MetricsWriter(self._file, self._journal.attempt) as rows:
                for row in stream_rows(start.directory / self._file.name):
                    kept = {key: value for key, value in row.items() if key not in MAKERS}
                    rows.append(kept | {"made_by": maker})
                rows.sync()
        self._updates = self._table.steps
        loop.changed()

    def _train(self, loop: Loop) -> None:
        steps = self._table.steps
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
