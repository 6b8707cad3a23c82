"""The supervised warm-up before the first step, with its own rows and checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from retrain.backends import Backend
from retrain.config.schema import Config
from retrain.control.rules import StateDict
from retrain.records.metrics import MetricsWriter
from retrain.records.row_parts import columns
from retrain.trainer.budget import Budget
from retrain.trainer.journal import Journal
from retrain.trainer.part import Loop, Part
from retrain.trainer.step import is_due
from retrain.trainer.updates import WarmUpUpdates


class WarmUp(Part):
    """Warms the policy up on demonstrations; the end is the checkpoint of step 0, with a fresh optimizer."""

    name = "warmup"

    def __init__(
        self,
        config: Config,
        file: Path,
        backend: Backend,
        journal: Journal,
        budget: Budget,
    ) -> None:
        self._config, self._file, self._backend = config, file, backend
        self._journal, self._budget = journal, budget
        self._updates = 0  # complete ones

    def begin(self, loop: Loop) -> None:
        steps, save_every = self._config.warmup.steps, self._config.training.save_every
        if self._updates >= steps or loop.step > 0:
            return
        warmup = WarmUpUpdates(self._config, self._backend, self._updates)
        with MetricsWriter(self._file, self._journal.attempt) as rows:
            while self._updates < steps:
                loop.before_step()
                self._journal.phase(f"warm-up {self._updates + 1} of {steps}", 0)
                row = warmup.step(self._updates + 1)
                self._budget.took_step()
                rows.append(asdict(row) | columns(self._budget.ledger.take()))
                self._updates += 1
                loop.changed()
                if self._updates < steps and is_due(save_every, self._updates):
                    rows.sync()
                    loop.save()
            rows.sync()
        warmup.finish()
        loop.save()

    def state_dict(self) -> StateDict:
        return {"updates": self._updates}

    def load_state_dict(self, state: StateDict) -> None:
        self._updates = state["updates"]
