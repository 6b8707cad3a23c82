"""The training loop: sample, reward, advantage, transform, update, observe, record.

Whatever else a run does is a part that attaches to it: see `retrain.trainer.part`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from retrain.backends import Backend
from retrain.base.clock import utc_now
from retrain.base.errors import BackendMemoryError, InterruptedRunError, RetrainError, UnscoredStepError
from retrain.config.schema import Config
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.row_parts import Value
from retrain.records.step_row import Identity, StepRow
from retrain.trainer import checkpoint
from retrain.trainer.batch import BoundAlgorithm, entropy_of
from retrain.trainer.budget import Ledger
from retrain.trainer.control import Control, LoadThrottle
from retrain.trainer.episodes import summary_of
from retrain.trainer.evaluation import HeldOut, OpenEval
from retrain.trainer.journal import Journal, choose
from retrain.trainer.part import Due, Loop, Part, StepSize, TakenStep, is_due
from retrain.trainer.permits import RunPermits
from retrain.trainer.refill import Refill
from retrain.trainer.source import Source, TrainingSampler
from retrain.trainer.step_meter import StepMeter, roofline
from retrain.trainer.teachers import TeacherSignal
from retrain.trainer.updates import Updates


@dataclass(frozen=True)
class OpenRun:
    """What the loop of a run works with, and the parts that attach to it."""

    config: Config
    files: RunFiles
    campaign: CampaignFiles
    journal: Journal
    stop: threading.Event  # set: save a checkpoint at the next step boundary and stop
    backend: Backend
    algorithm: BoundAlgorithm
    sampler: TrainingSampler
    source: Source
    refill: Refill
    control: Control
    throttle: LoadThrottle
    meter: StepMeter
    permits: RunPermits
    ledger: Ledger
    teacher: TeacherSignal | None
    evaluators: Sequence[HeldOut | OpenEval]


class Trainer(Loop):
    """One attempt at one run."""

    def __init__(self, run: OpenRun, parts: Sequence[Part]) -> None:
        self.parts, self.step = parts, 0  # complete steps
        self._run, self._training = run, run.config.training
        self._updates = Updates(run.config, run.backend, run.algorithm.loss)
        self._is_saved, self._has_checkpoint = True, False  # there is nothing to save at first

    def train(self) -> dict[str, Value]:
        """Train until the run is over; return what the parts have to say at the end, as rows have it.

        Raises:
            InterruptedRunError: a stop was requested; a checkpoint was saved if there was anything to save.
            NonFiniteError: a loss, gradient or metric is not finite; the last checkpoint is intact.
        """
        for part in self.parts:
            part.begin(self)
        while not self.is_over(self.step):
            self.before_step(self._due(self.step + 1))
            taken, row = self._next_step()
            self.step = taken.number
            self.changed()
            for part in self.parts:
                row = part.after_step(self, taken, row)
            self._run.journal.row(row)
            self._run.journal.samples(self.step, taken.samples)
            if taken.leave_with is not None:
                self.leave(taken.leave_with)
            if is_due(self._training.save_every, self.step):
                self.save()
        self._run.source.end_at(self.step)
        self.save()
        self.leave_if_due(self._due(self.step), is_step=False)
        return {key: value for part in self.parts for key, value in part.finish(self).items()}

    def _next_step(self) -> tuple[TakenStep, StepRow]:
        """Take one step; retry it with a smaller size if it does not fit in memory."""
        while True:
            size = self._run.control.next_size(self._run.throttle.load, self._run.throttle.waited_s)
            try:
                return self._take_step(size)
            except BackendMemoryError:
                if not self._run.control.out_of_memory(size):
                    raise
                self._run.source.put_back()
            except InterruptedRunError:  # the backend gave up the step
                if self._run.stop.is_set():
                    self.leave()
                raise
            except UnscoredStepError:
                # elsewhere, what was drawn since the last step would change those that follow
                if self._run.backend.info.bills:
                    self._run.source.stop()
                    self._run.source.put_back(is_too_large=False)
                    self.save()
                raise

    def _take_step(self, size: StepSize) -> tuple[TakenStep, StepRow]:
        """Sample, reward, estimate advantages, transform them, update, observe; return what to record."""
        run, algorithm, number = self._run, self._run.algorithm, self.step + 1
        run.sampler.begin(self.step)
        meter = run.meter.begin(self.step)
        groups = run.source.next_groups(size.batch_size, size.at_a_time, self.step)  # timed by the refill
        with meter.part("reward"):
            batch = algorithm.reward(groups, self.step)
        with meter.part("train"):
            advantages = algorithm.estimate(batch)
            samples = algorithm.transform(batch, advantages, self.step / self._training.max_steps)
            with run.source.updating(number):
                stats = self._updates.take(samples, size, number)
        timing = meter.timing()
        taken = TakenStep(
            number=number,
            size=size,
            batch=batch,
            timing=timing,
            rollouts=batch.summary(advantages, timing.step_time_s),
            stats=stats,
            trained_groups=len({sample.group for sample in samples}),
            entropy=entropy_of(batch, stats.entropy if samples else None),
            billed=self._updates.billed,
            samples=choose(batch, advantages, run.config.logging.samples_per_step, samples),
            pause=meter.pause(),
        )
        return taken, self._row(taken)

    def _row(self, taken: TakenStep) -> StepRow:
        """Have the controllers observe a step; return its row, to which parts add theirs."""
        run, planned = self._run, self._run.config.run
        control, back_pressure, throttle, scaling = run.control.observe(taken)
        return StepRow(
            identity=Identity(
                step=taken.number,
                run=planned.run_id if planned else "",
                condition=planned.condition if planned else "",
                seed=self._training.seed,
                attempt=run.journal.attempt,
                timestamp=utc_now(),
            ),
            timing=taken.timing,
            api=taken.pause,
            rollouts=taken.rollouts,
            episodes=summary_of(taken.batch.rollouts),
            update=self._updates.summary(
                taken.stats, self._training.lr * taken.size.lr_factor, taken.entropy
            ),
            mismatch=taken.stats.mismatch,
            control=control,
            back_pressure=back_pressure,
            throttle=throttle,
            scaling=scaling,
            roofline=roofline(run.config.backpressure, run.backend.take_sampling_work(), taken.stats.work),
            engine=run.backend.take_engine_use(),
        )

    def resume(self, saved: checkpoint.Checkpoint) -> None:
        """Restore a checkpoint; later steps equal those of an uninterrupted run."""
        self._run.backend.load(saved.directory)
        for part in self.parts:
            if part.name in saved.state:
                part.load_state_dict(saved.state[part.name])
        self.step, self._is_saved, self._has_checkpoint = saved.step, True, True

    def is_over(self, step: int) -> bool:
        return any(part.is_over(step) for part in self.parts)

    def before_step(self, due: Sequence[Due] = ()) -> None:
        for part in self.parts:
            part.before_step(self)
        self.leave_if_due(due)

    def leave_if_due(self, due: Sequence[Due] = (), *, is_step: bool = True) -> None:
        if (due or is_step) and self._run.stop.is_set():
            self.leave()
        for part in self.parts:
            if why := part.why_to_stop(self.step, due, is_step=is_step):
                self.leave(why)

    def leave(self, why: str | RetrainError = "") -> NoReturn:
        self._run.source.stop()  # or the next prompts would be sampled as soon as the checkpoint is written
        self.save()
        if isinstance(why, RetrainError):
            raise why
        because = f": {why}" if why else ""
        saved = "; a checkpoint was saved" if self._has_checkpoint else ""  # of step 0 only after a warm-up
        raise InterruptedRunError(f"stopped after step {self.step}{because}{saved}")

    def changed(self) -> None:
        self._is_saved = False

    def save(self) -> None:
        if self._is_saved:
            return
        self._run.journal.phase("checkpoint", self.step)
        self._sync()
        with self._run.source.exclusive():
            checkpoint.save(
                self._run.files.checkpoints,
                self.step,
                {part.name: part.state_dict() for part in self.parts if part.name},
                self._run.backend.save,
                self._training.keep_checkpoints,
            )
        self._is_saved = self._has_checkpoint = True

    def amend(self) -> None:
        if self._is_saved:
            self._sync()
            changed = {part.name: part.state_dict() for part in self.parts if part.changes_between_steps}
            checkpoint.amend(self._run.files.checkpoints, self.step, changed)

    def _sync(self) -> None:
        self._run.journal.sync()
        for part in self.parts:
            part.sync()

    def _due(self, step: int) -> list[Due]:
        return [evaluation for part in self.parts for evaluation in part.due(self, step)]
