"""The run's own evaluation and every `[[eval]]`, each when it is due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from retrain.config.eval_table import Eval
from retrain.config.schema import Config
from retrain.records.row_parts import Evaluation, NamedEvaluation, Value, columns
from retrain.records.spending import Tokens
from retrain.trainer.budget import RunBudget
from retrain.trainer.evals import Evals
from retrain.trainer.evaluation import Due, HeldOut
from retrain.trainer.journal import Journal

Made = TypeVar("Made", Evaluation, NamedEvaluation)


def is_due(every: int, done: int) -> bool:
    """Whether what comes every so many steps comes now; 0 is never."""
    return every > 0 and done % every == 0


def _is_due(table: Eval, done: int) -> bool:
    """Whether an `[[eval]]` comes after so many steps; 0 is before the first."""
    return is_due(table.every, done) if done else table.at_start


class EvalSchedule:
    """When a run evaluates its policy, and what for."""

    def __init__(
        self,
        config: Config,
        held_out: HeldOut,
        evals: Evals,
        journal: Journal,
        budget: RunBudget,
        made: Callable[[], None],
    ) -> None:
        """`made` is called after each evaluation."""
        self._training = config.training
        self._held_out, self._evals = held_out, evals
        self._journal, self._budget, self._made = journal, budget, made

    def due(self, step: int) -> list[Due]:
        """Return the evaluations that are due after so many steps, if they were not made yet."""
        at_end = step >= self._training.max_steps
        is_own = at_end or (step > 0 and is_due(self._training.eval_every, step))
        own = self._held_out.due(step) if is_own else []
        return [*own, *self._evals.due(step, (lambda *_: True) if at_end else _is_due)]

    def at_start(self) -> None:
        """Make those that are due before the first step; no row has them."""
        with self._budget.evaluating():
            self._named(0, _is_due)

    def of_step(self, step: int) -> dict[str, Any]:
        """Make those that are due after a step; return their parts of its row."""
        with self._budget.evaluating():
            own = self._own(step) if is_due(self._training.eval_every, step) else None
            evals = self._named(step, _is_due)
        return {"evaluation": own, "evals": evals, "eval_watch": self._evals.watch()}

    def at_end(self, step: int) -> dict[str, Value]:
        """Make all; return them as rows have them."""
        with self._budget.evaluating():
            evals, own = self._named(step, lambda *_: True), self._own(step)
        return columns(own) | columns(evals) | columns(self._evals.watch())

    def _own(self, step: int) -> Evaluation | None:
        self._journal.phase("evaluate", step)
        due = self._held_out.due(step)
        own = self._held_out.evaluate(step)
        return own if own is None else self._noted(own, due)

    def _named(self, step: int, is_due: Callable[[Eval, int], bool]) -> dict[str, NamedEvaluation]:
        due = {one.name: [one] for one in self._evals.due(step, is_due)}
        made = self._evals.evaluate(step, is_due)
        return {name: self._noted(one, due.get(name, ())) for name, one in made}

    def _noted(self, made: Made, due: Sequence[Due]) -> Made:
        """Note what an evaluation was billed, unless it was made before."""
        for one in due:
            self._budget.evaluated(one, Tokens(**made.billed))
            self._made()
        return made
