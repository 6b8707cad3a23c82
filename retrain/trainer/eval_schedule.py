"""When a run evaluates its policy, and what falls: a sign that the policy exploits its reward."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from retrain.base.errors import InterruptedRunError
from retrain.config.schema import Config
from retrain.control.rules import StateDict
from retrain.records.files import record_of
from retrain.records.row_parts import Evaluation, EvalWatch, NamedEvaluation, Value, columns
from retrain.records.spending import Tokens
from retrain.records.step_row import StepRow
from retrain.trainer.budget import Budget
from retrain.trainer.evaluation import AnyEvaluation, Due, HeldOut, Newest, OpenEval
from retrain.trainer.falling import Falling
from retrain.trainer.journal import Journal
from retrain.trainer.part import Loop, Part
from retrain.trainer.step import TakenStep


@dataclass(frozen=True)
class StepEvaluations:
    """The evaluations after a step: their parts of its row."""

    evaluation: Evaluation | None
    evals: Mapping[str, NamedEvaluation]
    eval_watch: EvalWatch | None

    def added_to(self, row: StepRow) -> StepRow:
        return replace(row, evaluation=self.evaluation, evals=self.evals, eval_watch=self.eval_watch)

    def columns(self) -> dict[str, Value]:
        return columns(self.evaluation) | columns(self.evals) | columns(self.eval_watch)


class EvalSchedule(Part):
    """The run's own evaluation and every `[[eval]]`, each when it is due and once per step."""

    name = "evals"
    changes_between_steps = True

    def __init__(
        self,
        config: Config,
        evaluators: Sequence[HeldOut | OpenEval],
        journal: Journal,
        budget: Budget,
        stop: threading.Event,
    ) -> None:
        self._max_steps, self._evaluators = config.training.max_steps, evaluators
        self._journal, self._budget, self._stop = journal, budget, stop
        self._newest = Newest(config)
        self._falling = Falling()
        self._owes = False  # a stop came before the newest row had its evaluations

    def begin(self, loop: Loop) -> None:
        """Make those that an earlier attempt owes, or those that come before the first step."""
        if self._owes:
            if why := self._why_to_leave(loop.step):
                loop.leave(why)
            self._journal.complete(loop.step, self._of_step(loop).columns())
            self._owes = False
        if loop.step == 0:
            loop.leave_if_due(self.due(0), is_step=False)
            self._of_step(loop)

    def due(self, step: int) -> list[Due]:
        coming = self._after(step, at_end=step >= self._max_steps)
        return [evaluator.due() for evaluator in coming if self._newest.of(evaluator.name, step) is None]

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        """Add the evaluations that are due; after a stop, the next attempt adds them."""
        self._falling.trained(taken.rollouts.mean_reward)
        why = self._why_to_leave(loop.step)
        if not why:
            try:
                return self._of_step(loop).added_to(row)
            except InterruptedRunError as error:
                why = str(error)
        self._owes, taken.leave_with = True, why
        return row

    def finish(self, loop: Loop) -> dict[str, Value]:
        """Make all of them; return their columns."""
        return self._of_step(loop, at_end=True).columns()

    def state_dict(self) -> StateDict:
        """Return the newest of each, so that a resumed run does not repeat them, and what falls."""
        falling = asdict(self._falling)
        return {"newest": self._newest.state_dict(), "falling": falling, "owes": self._owes}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned; another version's evaluations are not used."""
        self._falling = record_of(Falling, state["falling"])
        self._newest.load_state_dict(state["newest"])
        self._owes = state["owes"]

    def _why_to_leave(self, step: int) -> str:
        """Return why the next attempt makes the evaluations that are due; "" if this one does."""
        due = self.due(step)
        if due and self._stop.is_set():  # they may take longer than this process has left
            return "its evaluations are left to the next attempt"
        return self._budget.why_to_stop(step, due, is_step=False)

    def _of_step(self, loop: Loop, *, at_end: bool = False) -> StepEvaluations:
        """Make those that come after the newest step, at a run's end all."""
        with self._budget.evaluating():
            evaluations = {
                evaluator.name: self._evaluation(loop, evaluator)
                for evaluator in self._after(loop.step, at_end=at_end)
            }
        unnamed = evaluations.get(HeldOut.name)
        return StepEvaluations(
            unnamed if isinstance(unnamed, Evaluation) else None,
            {name: value for name, value in evaluations.items() if isinstance(value, NamedEvaluation)},
            self._falling.watch() if any(evaluator.name for evaluator in self._evaluators) else None,
        )

    def _after(self, step: int, *, at_end: bool) -> list[HeldOut | OpenEval]:
        """Return those that come after so many steps, at a run's end all."""
        return [evaluator for evaluator in self._evaluators if at_end or evaluator.is_due(step)]

    def _evaluation(self, loop: Loop, evaluator: HeldOut | OpenEval) -> AnyEvaluation:
        """Return an evaluation, the newest if it is of this step; raise if more are due after a stop."""
        name, step = evaluator.name, loop.step
        if newest := self._newest.of(name, step):
            return newest
        self._journal.phase(f"evaluate {name}".rstrip(), step)
        evaluation, batch = evaluator.evaluate(step)
        if isinstance(evaluator, OpenEval):
            self._journal.evaluated(name, step, batch.outcomes())
            questions = [batch.groups[number].prompt.id for number in batch.scored_groups.tolist()]
            scores = dict(zip(questions, batch.mean_by_group(batch.rewards).tolist(), strict=True))
            if scores:
                self._falling.evaluated(name, step, scores, evaluator.count(self._max_steps))
        self._newest.keep(name, step, evaluation)
        self._budget.evaluated(evaluator.due(), Tokens(**evaluation.billed))
        loop.amend()  # a kill would cost it again
        if self._stop.is_set() and self.due(step):
            raise InterruptedRunError("a stop was requested between evaluations")
        return evaluation
