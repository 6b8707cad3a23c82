"""The run's own evaluation and every `[[eval]]`, each when it is due."""

from __future__ import annotations

from typing import Any

from retrain.config.eval_table import Eval
from retrain.config.schema import Config
from retrain.records.evaluation_row import Evaluation
from retrain.records.row_parts import Value, columns
from retrain.records.spending import Tokens
from retrain.trainer.budget import RunBudget
from retrain.trainer.due import Due
from retrain.trainer.evals import Evals
from retrain.trainer.evaluation import HeldOut
from retrain.trainer.journal import Journal


def is_due(every: int, done: int) -> bool:
    """Whether what comes every so many steps comes now; 0 is never."""
    return every > 0 and done % every == 0


def _is_due(table: Eval, done: int) -> bool:
    """Whether an `[[eval]]` comes after so many steps; 0 is before the first."""
    return is_due(table.every, done) if done else table.at_start


class EvalSchedule:
    """When a run evaluates its policy, and what for."""

    def __init__(
        self, config: Config, held_out: HeldOut, evals: Evals, journal: Journal, budget: RunBudget
    ) -> None:
        self._training = config.training
        self._held_out, self._evals = held_out, evals
        self._journal, self._budget = journal, budget

    def due(self, step: int) -> list[Due]:
        """Return the evaluations that are due after so many steps, if they were not made yet."""
        at_end = step >= self._training.max_steps
        is_own = at_end or (step > 0 and is_due(self._training.eval_every, step))
        own = self._held_out.due(step) if is_own else []
        return [*own, *self._evals.due(step, (lambda *_: True) if at_end else _is_due)]

    def at_start(self) -> None:
        """Make those that are due before the first step; no row has them."""
        self._evals.evaluate(0, _is_due)

    def of_step(self, step: int) -> dict[str, Any]:
        """Make those that are due after a step; return their parts of its row."""
        own = self._own(step) if is_due(self._training.eval_every, step) else None
        evals = self._evals.evaluate(step, _is_due)
        self._learn(own, evals)
        return {"evaluation": own, "evals": evals, "eval_watch": self._evals.watch()}

    def at_end(self, step: int) -> dict[str, Value]:
        """Make all; return them as rows have them."""
        evals, own = self._evals.evaluate(step, lambda *_: True), self._own(step)
        self._learn(own, evals)
        return columns(own) | columns(evals) | columns(self._evals.watch())

    def _own(self, step: int) -> Evaluation | None:
        self._journal.phase("evaluate", step)
        return self._held_out.evaluate(step)

    def _learn(self, own: Evaluation | None, evals: Any) -> None:
        for name, one in {"": own, **evals}.items():
            if one is not None:
                self._budget.evaluated(name, Tokens(**one.billed))
