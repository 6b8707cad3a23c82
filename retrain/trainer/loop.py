"""The training loop: sample, reward, advantage, transform, update, observe, record."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NoReturn

from retrain.backends import Backend, Sampling
from retrain.base.clock import utc_now
from retrain.base.errors import BackendMemoryError, InterruptedRunError, UnscoredStepError
from retrain.base.rollouts import Group, Prompt
from retrain.config.schema import Config
from retrain.control.rules import Stateful
from retrain.control.rules.throttle import ThrottleState
from retrain.plugins.tasks import Task
from retrain.records.layout import RunFiles
from retrain.records.metrics import MetricsWriter
from retrain.records.row_parts import Value, columns
from retrain.records.rungs import read_wait, why_to_wait
from retrain.records.samples import KeptSample
from retrain.records.step_row import Identity, StepRow
from retrain.trainer import checkpoint
from retrain.trainer.batch import BoundAlgorithm, entropy_of
from retrain.trainer.budget import RunBudget
from retrain.trainer.control import Control, ControllerRows, StepFacts, StepSize
from retrain.trainer.episodes import SampleGroups, summary_of
from retrain.trainer.eval_schedule import EvalSchedule, OpenEval, is_due
from retrain.trainer.evaluation import Due, HeldOut
from retrain.trainer.journal import Journal, choose
from retrain.trainer.machine import open_throttle, wait_for_idle
from retrain.trainer.permits import RunPermits
from retrain.trainer.scoring import UnscoredCount
from retrain.trainer.source import AsyncSource, open_source
from retrain.trainer.step_meter import StepMeter
from retrain.trainer.turn_sampling import PlaySeeds
from retrain.trainer.updates import Updates, WarmUpUpdates


@dataclass(eq=False)
class Trainer:
    """One attempt at one run."""

    config: Config
    files: RunFiles
    backend: Backend
    task: Task
    algorithm: BoundAlgorithm
    permits: RunPermits
    budget: RunBudget
    journal: Journal
    stop: threading.Event  # set: save a checkpoint at the next step boundary and stop
    sample: SampleGroups  # completions, or whole episodes
    evals: Sequence[OpenEval]
    step: int = 0  # complete steps

    def __post_init__(self) -> None:
        self._training = self.config.training
        self._control = Control(self.config, len(self.task.train))
        self._source = open_source(self.config, self.backend.info, self.task, self._sample_to_train)
        self.budget.ahead = self._source if isinstance(self._source, AsyncSource) else None
        own = self.task.held_out[: self.config.data.eval_prompts]
        held_out = HeldOut(self.config, own, partial(self._exclusively, self.sample), self.algorithm.reward)
        made = self.journal, self.budget, self._keep_evaluations
        self._evals = EvalSchedule(self.config, held_out, self.evals, self._exclusively, *made)
        self._meter = StepMeter(self.backend, self.config.backpressure, self.journal)
        self._updates = Updates(self.config, self.backend, self.algorithm.loss)
        self._throttle = open_throttle(self.config, self.files.directory)
        self._warmed, self._saved = 0, (0, 0)  # complete supervised updates before the steps
        self._seeds = PlaySeeds(self.config, self.backend)
        self._unscored = UnscoredCount(self._training.max_unscored)
        self._parts: dict[str, Stateful] = {"source": self._source, "steering": self._control}
        self._parts |= {"evals": self._evals, "unscored": self._unscored, "budget": self.budget}
        self._owes_evaluation = False  # a stop came before the newest row was complete

    def train(self) -> dict[str, Value]:
        """Train until max_steps; return the final evaluations, as rows have them.

        Raises:
            InterruptedRunError: a stop was requested; a checkpoint was saved if there was anything to save.
            NonFiniteError: a loss, gradient or metric is not finite; the last checkpoint is intact.
        """
        self._warm_up()
        if self._owes_evaluation:
            if why := self._why_to_leave(self._evals.due(self.step)):
                self._stop(why)
            self.journal.complete(self.step, self._evals.of_step(self.step).columns())
            self._owes_evaluation = False
        if self.step == 0:
            self._stop_if_due(self._evals.due(0), is_step=False)
            self._evals.of_step(0)
        while self.step < self._training.max_steps:
            load = wait_for_idle(self._throttle, self.stop, self.journal, self.step)
            self._source.end_at(read_wait(self.files.rung) or self._training.max_steps)
            self._stop_if_due(self._evals.due(self.step + 1))
            try:
                row, shown = self._next_step(load)
            except InterruptedRunError:  # the backend gave up the step
                if self.stop.is_set():
                    self._stop()
                raise
            except UnscoredStepError:
                self._save_billed_steps()
                raise
            self.step += 1
            self.budget.took_step(row.rollouts.batch_size * row.rollouts.group_size, self._updates.billed)
            self._record(row, shown)
            if is_due(self._training.save_every, self.step):
                self.save()
            if self.step < self._training.max_steps:
                self._require_scorer()
        self.save()
        self._stop_if_due(self._evals.due(self.step), is_step=False)
        return self._evals.of_step(self.step, at_end=True).columns()

    def _record(self, row: StepRow, shown: list[KeptSample]) -> None:
        """Write a step's row with the evaluations that are due; after a stop, the next attempt adds them."""
        self._evals.trained(row.rollouts.mean_reward)
        stopped = self._why_to_leave(self._evals.due(self.step))
        try:
            if not stopped:
                made = self._evals.of_step(self.step)
                row = replace(row, evaluation=made.evaluation, evals=made.evals, eval_watch=made.eval_watch)
        except InterruptedRunError as error:
            stopped = str(error)
        self._owes_evaluation = bool(stopped)
        self.journal.row(row)
        self.journal.samples(self.step, shown)
        if stopped:
            self._stop(stopped)

    def _next_step(self, load: ThrottleState | None) -> tuple[StepRow, list[KeptSample]]:
        """Take one step; retry it with a smaller size if it does not fit in memory."""
        while True:
            size = self._control.next_size(load)
            try:
                return self._take_step(size)
            except BackendMemoryError:
                if not self._control.out_of_memory(size):
                    raise
                self._source.put_back()

    def _take_step(self, size: StepSize) -> tuple[StepRow, list[KeptSample]]:
        """Sample, reward, estimate advantages, transform them, update, observe; return what to record."""
        algorithm, progress = self.algorithm, self.step / self._training.max_steps
        self._seeds.begin(self.step)
        meter = self._meter.begin(self.step)
        with meter.part("sample"):
            groups = self._source.next_groups(size.batch_size, size.at_a_time, self.step)
        with meter.part("reward"):
            batch = algorithm.reward(groups, self.step)
        with meter.part("train"):
            advantages = algorithm.estimate(batch.rewards)
            samples = algorithm.transform(batch, advantages, progress)
            with self._source.updating(self.step + 1):
                stats = self._updates.take(samples, size, self.step + 1)
        timing, trained_groups = meter.timing(), len({sample.group for sample in samples})
        rollouts, episodes = batch.summary(advantages, timing.step_time_s), summary_of(batch.rollouts)
        entropy, unscored = entropy_of(batch, stats.entropy if samples else None), self._unscored.add(batch)
        facts = StepFacts(timing, rollouts, stats, trained_groups, entropy, episodes, unscored, meter.pause())
        observed = self._control.observe(size, facts, self.step + 1)
        shown = choose(batch, advantages, self.config.logging.samples_per_step)
        return self._row(size, facts, observed), shown

    def resume(self, found: checkpoint.Checkpoint) -> None:
        """Restore a checkpoint; later steps equal those of an uninterrupted run."""
        self.backend.load(found.directory)
        for name, part in self._parts.items():
            part.load_state_dict(found.state[name])
        self._owes_evaluation = found.state["owes_evaluation"]
        if self._throttle is not None and found.state["machine"] is not None:
            self._throttle.load_state_dict(found.state["machine"])
        self.step, self._warmed = self._saved = (found.step, found.state["warmup"])

    def save(self) -> None:
        """Write a checkpoint, unless one of the same state was written."""
        if (self.step, self._warmed) == self._saved:
            return
        self.journal.phase("checkpoint", self.step)
        self.journal.sync()
        self.budget.sync()
        with self._source.exclusive():
            state = {
                **{name: part.state_dict() for name, part in self._parts.items()},
                "machine": self._throttle.state_dict() if self._throttle else None,
                "warmup": self._warmed,
                "owes_evaluation": self._owes_evaluation,
            }
            checkpoint.save(
                self.files.checkpoints,
                self.step,
                state,
                self.backend.save,
                self._training.keep_checkpoints,
            )
        self._saved = (self.step, self._warmed)

    def _require_scorer(self) -> None:
        try:
            self._unscored.require_scorer()
        except UnscoredStepError:
            self._source.stop()
            self.save()
            raise

    def _save_billed_steps(self) -> None:
        if self.backend.info.bills:  # elsewhere, what was drawn since would change the steps that follow
            self._source.stop()
            self._source.put_back(is_too_large=False)
            self.save()

    def _keep_evaluations(self) -> None:
        """Add evaluations to this policy's checkpoint, if it has one; raise if more are due after a stop."""
        if (self.step, self._warmed) == self._saved:  # a kill would cost them again
            self.journal.sync()
            self.budget.sync()
            parts = {name: self._parts[name].state_dict() for name in ("evals", "budget")}
            checkpoint.amend(self.files.checkpoints, self.step, parts)
        if self.stop.is_set() and self._evals.due(self.step):
            raise InterruptedRunError("a stop was requested between evaluations")

    def close(self) -> None:
        """Stop sampling; whoever opened the backend closes it."""
        self._source.close()

    def _warm_up(self) -> None:
        """Run the supervised warm-up, then save it as the checkpoint of step 0 with a fresh optimizer."""
        steps = self.config.warmup.steps
        if self._warmed >= steps or self.step > 0:
            return
        warmup = WarmUpUpdates(self.config, self.backend, self._warmed)
        with MetricsWriter(self.files.warmup, self.journal.attempt) as rows:
            while self._warmed < steps:
                wait_for_idle(self._throttle, self.stop, self.journal, self.step)
                self._stop_if_due()
                self.journal.phase(f"warm-up {self._warmed + 1} of {steps}", 0)
                row = warmup.step(self._warmed + 1)
                self.budget.took_step()
                rows.append(asdict(row) | columns(self.budget.take()))
                self._warmed += 1
                if self._warmed < steps and is_due(self._training.save_every, self._warmed):
                    rows.sync()
                    self.save()
            rows.sync()
        warmup.finish()
        self.save()

    def _row(self, size: StepSize, facts: StepFacts, observed: ControllerRows) -> StepRow:
        run, stats = self.config.run, facts.stats
        return StepRow(
            identity=Identity(
                step=self.step + 1,
                run=run.run_id if run else "",
                condition=run.condition if run else "",
                seed=self._training.seed,
                attempt=self.journal.attempt,
                timestamp=utc_now(),
            ),
            timing=facts.timing,
            permits=self.permits.take_use(),
            cost=self.budget.take(),
            api=facts.pause,
            rollouts=facts.rollouts,
            unscored=facts.unscored,
            episodes=facts.episodes,
            update=self._updates.summary(stats, self._training.lr * size.lr_factor, facts.entropy),
            mismatch=stats.mismatch,
            control=observed.control,
            back_pressure=observed.back_pressure,
            throttle=observed.throttle,
            scaling=observed.scaling,
            roofline=self._meter.roofline(stats.work),
            engine=self._meter.engine(),
            pipeline=self._source.stats(),
        )

    def _exclusively(self, sample: SampleGroups, prompts: Sequence[Prompt], how: Sampling) -> list[Group]:
        with self._source.exclusive():
            return sample(prompts, how)

    def _sample_to_train(self, prompts: Sequence[Prompt], enough: int = 0, due: int = 0) -> list[Group]:
        table, seed = self._training, self._seeds.next()
        how = Sampling(table.group_size, table.max_tokens, table.temperature, seed, enough, due)
        with self.budget.sampling(len(prompts) * table.group_size):
            return self.sample(prompts, how)

    def _why_to_leave(self, due: Sequence[Due]) -> str:
        """Return why the next attempt makes the evaluations that are due; "" if this one does."""
        if due and self.stop.is_set():  # they may take longer than this process has left
            return "its evaluations are left to the next attempt"
        return self.budget.why_to_stop(due, is_step=False)

    def _stop_if_due(self, due: Sequence[Due] = (), *, is_step: bool = True) -> None:
        if (due or is_step) and self.stop.is_set():
            self._stop()
        if why := why_to_wait(self.files.rung, self.step) or self.budget.why_to_stop(due, is_step=is_step):
            self._stop(why)

    def _stop(self, why: str = "") -> NoReturn:
        self._source.stop()  # or the next prompts would be sampled as soon as the checkpoint is written
        self.save()
        because = f": {why}" if why else ""
        saved = "; a checkpoint was saved" if any(self._saved) else ""  # of step 0 only after a warm-up
        raise InterruptedRunError(f"stopped after step {self.step}{because}{saved}")
